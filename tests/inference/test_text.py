"""Tokens as text: whole characters, stops, the end of a document."""

import numpy as np
import pytest

from ddl_jax.data import ByteTokenizer
from ddl_jax.inference.text import Text

BYTES = ByteTokenizer()


def pieces(text, stop=(), end=()):
    """What each byte of a text adds, and the rest."""
    row = Text(BYTES, stop)
    return [*(row.add(int(token)) for token in (*BYTES.encode(text), *end)), row.rest()], row


@pytest.mark.parametrize("text", ["a", "für €5", "日本語", "👍🏽!", "", "a\ufffdb"])
def test_a_character_comes_with_its_last_byte(text):
    found, row = pieces(text)
    assert "".join(found) == text
    assert not row.done
    # Nothing comes late: after each byte, what is whole is there.
    data = text.encode()
    for n in range(len(data)):
        try:
            whole = data[: n + 1].decode()
        except UnicodeDecodeError:
            continue
        assert "\ufffd" in text or "".join(found[: n + 1]) == whole


def test_bytes_that_never_make_a_character_do_not_hold_up_the_text():
    row = Text(BYTES)
    found = [row.add(token) for token in [0xFF] * 4 + list(b"ok")]
    assert "".join(found) == "\ufffd" * 4 + "ok"
    row = Text(BYTES)
    assert row.add(0xE2) == ""
    assert row.rest() == "\ufffd"


def test_a_character_after_broken_ones_is_whole():
    for broken in ("\ufffd".encode(), b"\xa2\xa2\xa2", b"\xf0\x9f", b"\xff" * 200):
        for character in "é漢🎉":
            data = broken + character.encode() + b"."
            row = Text(BYTES)
            found = [row.add(byte) for byte in data]
            assert "".join(found) == data.decode(errors="replace")
            assert max(map(len, found)) <= 3, "what is broken for good does not wait"


def test_a_stop_ends_the_text_and_is_no_part_of_it():
    found, row = pieces("one. two\n\nthree", stop=["\n\n", "three"])
    assert "".join(found) == "one. two"
    assert row.done
    assert row.add(65) == ""


def test_the_first_of_several_stops_counts():
    found, _ = pieces("abcd", stop=["cd", "b"])
    assert "".join(found) == "a"


def test_what_may_be_the_beginning_of_a_stop_is_held_back_until_it_is_none():
    row = Text(BYTES, ["###"])
    assert [row.add(token) for token in b"a##b#"] == ["a", "", "", "##b", ""]
    assert row.rest() == "#"


def test_the_separator_ends_the_text():
    found, row = pieces("end#", stop=["##"], end=[BYTES.separator, 65])
    assert "".join(found) == "end#"
    assert row.done


class Pieces:
    """A tokenizer whose first piece loses its space, as sentencepiece's do."""

    separator, vocab_size = 0, 10

    def decode(self, tokens):
        return "".join(f" w{token}" for token in np.asarray(tokens)).lstrip(" ")


def test_a_piece_is_written_as_it_is_after_the_one_before():
    row = Text(Pieces())
    assert [row.add(n) for n in (1, 2, 3)] == ["w1", " w2", " w3"]


class Fallback:
    """A tokenizer of which a run of bytes is text as a whole or not at all, as sentencepiece's are for rare letters."""

    separator, vocab_size = 256, 257

    def decode(self, tokens):
        try:
            return bytes(np.asarray(tokens, np.uint8)).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(tokens)


def test_a_character_is_not_taken_back_while_the_next_one_comes():
    row = Text(Fallback())
    assert [row.add(byte) for byte in "é🎉".encode()] == ["", "é", "", "", "", "🎉"]
