"""Text from prompts, in Python and on the command line."""

import json
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from ddl_jax.__main__ import dispatch, main
from ddl_jax.config import ResidualConfig
from ddl_jax.data import ByteTokenizer
from ddl_jax.errors import InputError
from ddl_jax.inference import Sampling, generate, next_tokens, skipping, stream
from tests.inference.models import make_model

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def model():
    return make_model(ResidualConfig(), layers=1, context_length=64, vocab_size=320)


def test_the_likeliest_tokens_are_those_of_the_full_forward_pass(model):
    prompts = [np.array([7, 3, 250]), np.array([256])]
    found = np.stack(list(next_tokens(model, prompts, tokens=40, sampling=GREEDY, vocab_size=257)), axis=1)
    for prompt, row in zip(prompts, found, strict=True):
        whole = np.concatenate([prompt, row])[None]
        logits = model(jnp.asarray(whole))[0, :, :257]
        np.testing.assert_array_equal(row, np.argmax(logits, axis=-1)[len(prompt) - 1 : -1])


def test_a_seed_gives_the_same_text_whatever_else_is_in_the_batch(model):
    tokenizer = ByteTokenizer()
    options = {"tokens": 12, "sampling": Sampling(top_p=0.9)}
    both = generate(model, tokenizer, ["one", "a longer prompt"], seed=5, **options)
    assert generate(model, tokenizer, ["one", "x"], seed=5, **options)[0] == both[0]
    assert generate(model, tokenizer, ["one", "a longer prompt"], seed=5, **options) == both
    assert generate(model, tokenizer, ["one", "one"], seed=6, **options)[0] != both[0]
    assert len(set(generate(model, tokenizer, ["one", "one"], seed=5, **options))) == 2


def test_only_tokens_of_the_tokenizer_are_drawn(model):
    """The embedding has 320 rows: 63 more than there are tokens, as likely as others at the start."""
    drawn = np.stack(list(next_tokens(model, [np.array([1])] * 8, tokens=20, vocab_size=257)))
    assert drawn.max() < 257
    assert np.stack(list(next_tokens(model, [np.array([1])] * 8, tokens=20))).max() >= 257


class Fixed:
    """A tokenizer for what the tests want to hear: every token is a letter."""

    vocab_size, separator = 320, 320  # which is never drawn

    def encode(self, text):
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens):
        return "".join(chr(97 + token % 26) for token in np.asarray(tokens))


def test_a_stop_ends_its_own_row_and_all_stops_end_the_work(model):
    whole = generate(model, Fixed(), ["ab", "cd"], tokens=30, sampling=Sampling(), seed=1)
    assert [len(text) for text in whole] == [30, 30]
    stop = whole[0][10:13]
    assert stop not in whole[0][:10]
    ended = generate(model, Fixed(), ["ab", "cd"], tokens=30, sampling=Sampling(), seed=1, stop=[stop])
    assert ended == [whole[0][:10], whole[1].partition(stop)[0]]
    alone = list(stream(model, Fixed(), ["ab"], tokens=30, sampling=Sampling(), seed=1, stop=[stop]))
    assert len(alone) == 13


@pytest.mark.parametrize("arguments, message", [
    ({"tokens": 0}, "tokens 0 must be a whole number, at least 1"),
    ({"tokens": "8"}, "tokens '8' must be a whole number, at least 1"),
    ({"prompts": []}, "a prompt holds no tokens"),
    ({"prompts": [np.array([257])]}, "a prompt holds token 257, outside the vocabulary of 257"),
    ({"prompts": [np.array([320])], "vocab_size": 50257}, "a prompt holds token 320, outside the vocabulary of 320"),
    ({"sampling": Sampling(top_p=2.0)}, "top_p 2.0"),
])  # fmt: skip
def test_bad_arguments(model, arguments, message):
    with pytest.raises(InputError, match=message):
        next(next_tokens(model, **{"prompts": [np.array([1])], "tokens": 5, "vocab_size": 257} | arguments))


@pytest.mark.parametrize("arguments, message", [
    ({"tokens": 0}, "tokens 0 must be a whole number, at least 1"),
    ({"tokens": "8"}, "tokens '8' must be a whole number, at least 1"),
    ({"prompts": "ab"}, r"prompts 'ab' must be a list of texts, e.g. \['ab'\]"),
    ({"prompts": [None]}, "prompt null must be text"),
    ({"stop": "ab"}, "stop 'ab' must be a list of texts"),
    ({"stop": ["a", ""]}, "an empty stop"),
    ({"prompts": ["a", "b\udcff"]}, r"prompt 'b\\udcff' is not text: character 2 is half of one"),
])  # fmt: skip
def test_a_stream_refuses_before_it_begins(model, arguments, message):
    with pytest.raises(InputError, match=message):
        stream(model, ByteTokenizer(), **{"prompts": ["a"]} | arguments)


def test_the_command_writes_the_text_and_says_how_fast(run_of_eight, capsys):
    run = str(run_of_eight)
    arguments = ["generate", "--run", run, "--prompt", "abc", "--tokens", "40", "--temperature", "0"]
    assert dispatch(arguments) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("abc") and shown.out.endswith("\n")
    assert re.fullmatch(rf"step 8 of {re.escape(run)}: \d+ tokens, [\d,.]+ tokens/s\n", shown.err)
    assert dispatch([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert shown.out == "abc" + found["results"][0]["text"] + "\n"
    assert found["step"] == 8 and found["tokens_per_second"] > 0

    assert dispatch([*arguments, "--prompt", "x", "--skip-below", "2"]) == 0
    skipped = capsys.readouterr().out
    assert "[1] abc" in skipped and "[2] x" in skipped
    with pytest.raises(InputError, match="tokens 0"):
        dispatch([*arguments, "--tokens", "0"])
    assert capsys.readouterr().out == ""
    assert found["results"][0]["text"] not in skipped  # no edit at all: another text


@pytest.mark.parametrize("arguments, message", [
    ([], "--run is missing"),
    (["--run", "nowhere"], "--prompt is missing"),
    (["--run", "nowhere", "--prompt", "a"], "run_dir 'nowhere' is not a folder"),
    (["--run", "nowhere", "--prompt", "a", "--seed", "-1"], "--seed -1 must lie in"),
    (["--run", "nowhere", "--prompt", "a", "--tokens", "many"], "--tokens 'many' is not a whole number"),
    (["--run", "nowhere", "--prompt", "a", "--top-p", "0"], "top_p 0.0 must lie in"),
    (["--run", "nowhere", "--prompt", "a", "--topk", "3"], "unknown option '--topk'; did you mean '--top-k'"),
])  # fmt: skip
def test_what_cannot_be_generated_is_said_in_one_line(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ddl", "generate", *arguments])
    assert main() == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err and len(shown.err.splitlines()) == 1


def test_a_model_without_gates_has_nothing_to_skip():
    with pytest.raises(InputError, match="kind 'additive' has no gate"):
        skipping(make_model(ResidualConfig(kind="additive")), 0.1)
    with pytest.raises(InputError, match="kind 'mhc' has no gate"):
        skipping(make_model(ResidualConfig(kind="mhc")), 0.1)
    with pytest.raises(InputError, match="skip_below 3.0 must lie in"):
        skipping(make_model(ResidualConfig()), 3.0)
