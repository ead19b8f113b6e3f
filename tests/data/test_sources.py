"""Documents out of files: every kind gives the same ones, from any place on; what cannot be read is one line."""

import gzip
import json
from pathlib import Path
import random
import sys

import pyarrow
from pyarrow import parquet
import pytest

from ddl_jax.data import sources
from ddl_jax.data.sources import chunks, documents, find_sources
from ddl_jax.errors import InputError

TEXTS = [f"{number}: " + "å\r\n\u2028 \ufeff" * (number % 5) for number in range(50)]
LINES = [json.dumps({"id": number, "text": text}, ensure_ascii=number % 2) for number, text in enumerate(TEXTS)]


def zstd(data: bytes) -> bytes:
    buffer = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(buffer, "zstd") as stream:
        stream.write(data)
    return buffer.getvalue().to_pybytes()


def write_parquet(path: Path, column, rows: int = 7) -> None:
    parquet.write_table(pyarrow.table({"id": range(len(column)), "text": column}), path, row_group_size=rows)


def write(path: Path) -> Path:
    """The documents in a file of the kind that its name says."""
    lines = ("\n".join(LINES[:20]) + "\n\n \r\n" + "\n".join(LINES[20:])).encode()
    name = path.name.lower()
    if name.endswith(".parquet"):
        kinds = {"large": pyarrow.large_string(), "codes": pyarrow.dictionary(pyarrow.int32(), pyarrow.string())}
        write_parquet(path, pyarrow.array(TEXTS, pyarrow.string()).cast(kinds.get(path.stem, pyarrow.string())))
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines[:1000]) + gzip.compress(lines[1000:]))  # two members, as `cat` makes them
    elif name.endswith(".zst"):
        path.write_bytes(zstd(lines[:1000]) + zstd(lines[1000:]))
    else:
        path.write_bytes(b"\xef\xbb\xbf" * name.startswith("mark") + lines)
    return path


def read(path: Path, first: int = 0, field: str = "text") -> list[str]:
    (source,) = find_sources([str(path)], field)
    return [document.text for chunk in chunks(source, field, first) for document in documents(chunk, field)]


NAMES = [
    "a.parquet",
    "large.parquet",
    "codes.parquet",
    "a.jsonl",
    "mark.ndjson",
    "a.JSON.GZ",
    "a.jsonl.gz",
    "a.json.zst",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_gives_the_same_documents_from_any_place_on(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 40)
    monkeypatch.setattr(sources, "ROWS", 3)
    path = write(tmp_path / name)
    assert read(path) == TEXTS
    (source,) = find_sources([str(path)], "text")
    found = list(chunks(source, "text"))
    assert len(found) > 10
    assert [chunk.first for chunk in found[1:]] == [chunk.end for chunk in found[:-1]]
    assert found[-1].read == source.size and all(chunk.read <= source.size for chunk in found)
    for first in (1, 7, 20, 21, 22, 30, found[-1].end - 1):
        before = [text for chunk in found for text in chunk.items][:first]
        skipped = sum(1 for item in before if item.strip())
        assert read(path, first) == TEXTS[skipped:]
    assert read(path, found[-1].end) == []


@pytest.mark.parametrize("name, data", [("a.txt", b"%s"), ("README", b"%s"), ("a.md.gz", None), ("a.txt.zst", None)])
def test_a_text_file_is_a_document(tmp_path, name, data):
    text = "".join(TEXTS).encode()
    pack = {"gz": gzip.compress, "zst": zstd}.get(name.rpartition(".")[2], bytes)
    (tmp_path / name).write_bytes(pack(text))
    assert read(tmp_path / name) == [text.decode()]


def test_sources_come_in_the_order_of_their_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a.txt", "c.jsonl"):
        Path(name).write_text("")
    found = find_sources(["*.jsonl", "?.txt", "./a*"], "text")
    assert [(source.index, source.path, source.kind) for source in found] == [
        (0, "a.txt", "text"),
        (1, "b.txt", "text"),
        (2, "c.jsonl", "jsonl"),
    ]


def refusal(path: Path, data: bytes | None = None, field: str = "text") -> str:
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(InputError) as caught:
        read(path, field=field)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400 + len(str(path))
    return message.replace(repr(str(path)), path.name)


LONG = "\n".join(LINES * 20).encode()
WRONG = {
    "line 2 is not JSON (Expecting value, column 10); repair or remove it": b'{"text": "a"}\n{"text": }',
    "line 1 is not a JSON object but [1, 2]; each line must be one with 'text'": b"[1, 2]\n",
    "line 3 has no field 'text'; it has: id, body; choose with --text-field": b'{"text": ""}\n\n{"id": 1, "body": ""}',
    "line 1: field 'text' is 3, not text; choose with --text-field, or remove the line": b'{"text": 3}',
    "line 1: field 'text' is null, not text": b'{"text": null}',
    "line 2 is not UTF-8 (byte 10 is 0xff)": b'{"text": ""}\n{"text": "\xff"}',
    "line 1 is not UTF-8 (byte 10 is 0xed)": b'{"text": "\xed\xa0\x80"}',  # half a character, in bytes
    "line 1: the text has half a character (a lone surrogate) at position 1": b'{"text": "a\\ud800"}',
    "line 1 is not JSON that can be read": b"[" * 200_000,
    "line 2 is not JSON (Expecting value, column 1)": b'{"text": ""}\n\x00\x01',
}


@pytest.mark.parametrize("message", WRONG)
def test_a_line_that_is_no_document_is_refused(tmp_path, message):
    assert f"a.jsonl, {message}" in refusal(tmp_path / "a.jsonl", WRONG[message])


def test_a_compressed_file_that_is_cut_short_or_corrupt_is_refused(tmp_path):
    for name, pack in (("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstd), ("a.txt.gz", gzip.compress)):
        whole = pack(LONG)
        for data in (whole[:-1], whole[: len(whole) // 2], b"not compressed", whole + b"not compressed"):
            message = refusal(tmp_path / name, data)
            assert f"{name} is cut short or corrupt" in message and "copy it again, or leave it out" in message
        assert f"{name} is cut short: it is empty" in refusal(tmp_path / name, b"")
    assert "after line 0 (" in refusal(tmp_path / "a.jsonl.gz", b"not compressed")


def test_an_unusable_parquet_file_is_refused_before_anything_is_read(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, ["text"] * 20)
    data = path.read_bytes()
    for wrong in (data[:-9], data[:100], b"", b"text " * 100):
        path.write_bytes(wrong)
        with pytest.raises(InputError, match=r"a.parquet' is cut short or corrupt \("):
            find_sources([str(path)], "text")
    path.write_bytes(data)
    assert "a.parquet has no column 'body'; it has: id, text; choose with --text-field" in refusal(path, field="body")
    assert "a.parquet: column 'id' is int64, not text; choose with --text-field" in refusal(path, field="id")


def test_a_corrupt_row_group_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, [f"a text of its own, {number}" for number in range(4000)], rows=1000)
    group = parquet.ParquetFile(path).metadata.row_group(2).column(1)
    data = bytearray(path.read_bytes())
    begin = group.dictionary_page_offset or group.data_page_offset
    data[begin : begin + group.total_compressed_size] = bytes(group.total_compressed_size)
    assert "a.parquet is cut short or corrupt in row group 2 (" in refusal(path, bytes(data))
    table = pyarrow.table({"text": ["a text " * 100]})
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}  # the text stands there once
    parquet.write_table(table, path, write_page_checksum=True, **plain)
    data = path.read_bytes()
    place = data.index(b"a text " * 100)
    assert "in row group 0 (could not verify page integrity" in refusal(path, data[:place] + b"b" + data[place + 1 :])
    write_parquet(path, ["text"] * 9 + [None])
    assert "a.parquet, row group 1, row 2 has no text in column 'text' (null)" in refusal(path)
    wrong = pyarrow.array([b"text", b"\xff"]).view(pyarrow.string())
    write_parquet(path, wrong)
    assert "a.parquet, row group 0, row 1 is not UTF-8 (byte 0 is 0xff)" in refusal(path)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz", "a.jsonl.zst", "a.jsonl"])
def test_damage_anywhere_is_refused_in_one_line_or_harmless(tmp_path, name):
    path = write(tmp_path / name)
    whole, draw = path.read_bytes(), random.Random(0)
    for _ in range(30):
        data = bytearray(whole)
        for _ in range(draw.choice([1, 10])):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data[: draw.choice([len(data), draw.randrange(len(data))])])
        try:
            read(path)
        except InputError as error:
            assert "\n" not in str(error) and repr(str(path)) in str(error)


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(InputError, match=r"SOURCE\[1\] '.*/b\*' matches no file"):
        (tmp_path / "a.txt").write_text("text")
        find_sources([str(tmp_path / "a*"), str(tmp_path / "b*")], "text")
    (tmp_path / "binary.txt").write_bytes(b"\x89PNG")
    assert "binary.txt is not UTF-8 (byte 0 is 0x89)" in refusal(tmp_path / "binary.txt")


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.zst"])
def test_a_missing_package_says_how_to_get_it(tmp_path, monkeypatch, name):
    path = write(tmp_path / name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert f"{name} needs the package 'pyarrow', which is not installed; pip install -e '.[text]'" in refusal(path)
