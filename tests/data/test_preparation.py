"""Text to token shards: what they hold, that the documents alone decide it, and that no start is half a start."""

from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
import dataclasses
import hashlib
import json
import multiprocessing
import os
from pathlib import Path
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest

from ddl_jax.config import DataConfig
from ddl_jax.config.preparation import PreparationConfig
from ddl_jax.data import ByteTokenizer, prepare
from ddl_jax.data.encoding import _in_order
from ddl_jax.data.output import OutputFolder
from ddl_jax.data.preparation import prepare_shards
from ddl_jax.errors import InputError, RunError

TEXTS = [f"document {number} " * (1 + number % 7) for number in range(60)]


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def settings(folder: Path, out: str = "out", **changes) -> PreparationConfig:
    """Byte tokens of all .jsonl files, in shards of 300 of them."""
    defaults = {"tokenizer": "bytes", "validation_fraction": 0.2, "shard_tokens": 300}
    return PreparationConfig((str(folder / "*.jsonl"),), str(folder / out), **defaults | changes)


def run(config: PreparationConfig, stop_after: int = 10**9) -> dict | None:
    """Prepares shards; stops when so many chunks of documents are written."""
    config.validate()
    written = []
    return prepare_shards(config, lambda: len(written) >= stop_after, lambda *said: written.append(said))


def refusal(config: PreparationConfig, error: type = InputError) -> str:
    with pytest.raises(error) as caught:
        run(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def held_out(text: str, fraction: float) -> bool:
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) / 2**64 < fraction


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr("ddl_jax.data.sources.CHUNK_BYTES", 100)


# ---- what shards hold


@pytest.mark.usefixtures("small_chunks")
def test_shards_hold_whole_documents_each_behind_a_separator(tmp_path):
    write_lines(tmp_path / "a.jsonl", [*TEXTS[:30], " \n\t", ""])
    write_lines(tmp_path / "b.jsonl", [*TEXTS[30:], "x" * 500, "last"])
    index = run(settings(tmp_path))
    texts = [*TEXTS, "x" * 500, "last"]
    tokens = ByteTokenizer()
    for side, name in (("train", "train"), ("val", "validation")):
        expected = [[256, *tokens.encode(text)] for text in texts if held_out(text, 0.2) == (side == "val")]
        found = []
        shards = [shard for shard in index["shards"] if f"_{side}_" in shard["name"]]
        for number, shard in enumerate(shards):
            path = tmp_path / "out" / shard["name"]
            assert path.name == f"tokens_{side}_{number:06d}.bin"
            data = path.read_bytes()
            header, stored = np.frombuffer(data[:1024], "<i4"), np.frombuffer(data[1024:], "<u2")
            assert header.tolist() == [20240520, 1, len(stored), *[0] * 253]
            assert (shard["tokens"], shard["sha256"]) == (len(stored), hashlib.sha256(data).hexdigest())
            boundaries = np.load(tmp_path / "out" / shard["documents_file"])
            assert boundaries.dtype == np.int64 and boundaries[-1] == len(stored)
            documents = [part.tolist() for part in np.split(stored, boundaries[1:-1])]
            assert len(documents) == shard["documents"]
            after = expected[len(found) + len(documents) :][:1]
            assert len(stored) <= 300 or len(documents) == 1
            assert not after or len(stored) + len(after[0]) > 300, "the shard ended too early"
            found += documents
        assert found == expected
        assert index[f"{name}_documents"] == len(expected)
        assert index[f"{name}_tokens"] == sum(map(len, expected))
    assert max(shard["tokens"] for shard in index["shards"]) == 501
    assert (index["empty_documents"], index["text_bytes"]) == (2, sum(map(len, texts)))
    assert [(source["name"][-7:], source["documents"]) for source in index["sources"]] == [
        ("a.jsonl", 30),
        ("b.jsonl", 32),
    ]
    assert json.loads((tmp_path / "out" / "index.json").read_text()) == index
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {"", ".bin", ".npy", ".json"}


def test_a_large_vocabulary_takes_32_bits_and_trains(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<|endoftext|>": 0} | {f"w{number}": number for number in range(1, 70_000)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save(str(tmp_path / "words.json"))
    texts = [f"w{number} w{69_999 - number}" for number in range(40)]
    write_lines(tmp_path / "a.jsonl", texts)
    index = run(settings(tmp_path, tokenizer=str(tmp_path / "words.json"), shard_tokens=10**6))
    data = (tmp_path / "out" / "tokens_train_000000.bin").read_bytes()
    assert np.frombuffer(data[:12], "<i4").tolist() == [20240520, 2, index["train_tokens"]]
    expected = [id for n in range(40) if not held_out(texts[n], 0.2) for id in (0, n, 69_999 - n)]
    assert np.frombuffer(data[1024:], "<u4").tolist() == expected
    corpus = prepare(training(tmp_path, tokenizer=str(tmp_path / "out" / "tokenizer.json")), 2, tmp_path / "run")
    assert corpus.train.stretches[0].map().tolist() == expected
    assert len(corpus.validation) == index["validation_tokens"] > 0


def test_text_that_the_tokenizer_has_no_tokens_for_is_refused(tmp_path):
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.WordLevel({"</s>": 0, "word": 1}, unk_token="<unk>"))
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "words.json"))
    write_lines(tmp_path / "a.jsonl", ["word", "another"])
    message = refusal(settings(tmp_path, tokenizer=str(tmp_path / "words.json")))
    assert "a.jsonl', line 2 cannot be encoded by --tokenizer: " in message


def training(folder: Path, **changes) -> DataConfig:
    return DataConfig(corpus="shards", paths=(str(folder / "out" / "*.bin"),), **changes).resolve()


def test_training_refuses_another_tokenizer_than_the_index_names(tmp_path):
    write_lines(tmp_path / "a.jsonl", TEXTS)
    run(settings(tmp_path))
    assert prepare(training(tmp_path, tokenizer="bytes"), 10, tmp_path / "run")
    with pytest.raises(InputError, match=r"data.tokenizer 'gpt2' is not the one that made .*index.json.* use 'bytes'"):
        prepare(training(tmp_path, tokenizer="gpt2"), 10, tmp_path / "run2")
    (tmp_path / "out" / "index.json").write_text('{"format": ')
    with pytest.raises(InputError, match=r"index.json' cannot be read: it is not JSON"):
        prepare(training(tmp_path, tokenizer="bytes"), 10, tmp_path / "run")
    (tmp_path / "out" / "index.json").write_text("[]")  # someone else's
    assert prepare(training(tmp_path, tokenizer="bytes"), 10, tmp_path / "run")


def test_the_split_is_decided_by_each_document_alone(tmp_path):
    write_lines(tmp_path / "a.jsonl", TEXTS)
    few = run(settings(tmp_path))
    write_lines(tmp_path / "a.jsonl", [*TEXTS[::-1], "another", *TEXTS])
    many = run(settings(tmp_path, "out2"))
    more = held_out("another", 0.2)
    assert many["validation_documents"] == 2 * few["validation_documents"] + more
    assert many["train_documents"] == 2 * few["train_documents"] + (not more)
    none = run(settings(tmp_path, "out3", validation_fraction=0.0))
    assert none["validation_documents"] == 0 and not list((tmp_path / "out3").glob("*val*"))


# ---- what does not change them


@pytest.mark.usefixtures("small_chunks")
def test_neither_the_number_of_processes_nor_a_stop_changes_a_byte(tmp_path):
    write_lines(tmp_path / "a.jsonl", TEXTS[:40])
    (tmp_path / "b.jsonl").write_text("\n")
    write_lines(tmp_path / "c.jsonl", [*TEXTS[40:], "not the <|endoftext|> of a document"])
    config = settings(tmp_path, tokenizer="gpt2", shard_tokens=100)
    index = run(config)
    shards = [np.fromfile(tmp_path / "out" / shard["name"], "<u2")[512:] for shard in index["shards"]]
    assert sum(np.count_nonzero(shard == 50256) for shard in shards) == len(TEXTS) + 1
    straight = files(tmp_path / "out")
    assert len(straight) > 8
    assert run(dataclasses.replace(config, out=str(tmp_path / "two"), workers=2))
    assert files(tmp_path / "two") == straight
    stopped = dataclasses.replace(config, out=str(tmp_path / "stopped"))
    starts = 0
    while run(stopped, stop_after=5) is None:
        starts += 1
        assert (tmp_path / "stopped" / "progress.json").exists() and not (tmp_path / "stopped" / "index.json").exists()
    assert starts > 3
    assert files(tmp_path / "stopped") == straight
    assert run(stopped) == json.loads(straight["index.json"]), "when all is done, it is done at once"
    assert files(tmp_path / "stopped") == straight


KILLED = """
import itertools, json, os, pathlib, shutil, sys
from ddl_jax.config.preparation import PreparationConfig
from ddl_jax.data import preparation, sources, writer
sources.CHUNK_BYTES, preparation.RECORD_SECONDS, folder = 150, 0.0, pathlib.Path(sys.argv[1])

def prepare(out, survives):
    left = itertools.count(survives, -1)
    def killed(call):
        def instead(*arguments, **keywords):
            if next(left) == 0:
                os._exit(9)
            return call(*arguments, **keywords)
        return instead
    if survives >= 0:
        os.fsync, os.replace = killed(os.fsync), killed(os.replace)
        pathlib.Path.unlink = killed(pathlib.Path.unlink)
        writer._GrowingFile.append = killed(writer._GrowingFile.append)
    config = PreparationConfig((str(folder / "*.jsonl"),), str(folder / out), "bytes", "text", 0.2, 300)
    preparation.prepare_shards(config, lambda: False, lambda *_: None)

def status(out, survives):
    child = os.fork()
    if child == 0:
        prepare(out, survives)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def files(out):
    return {path.name: path.read_bytes() for path in (folder / out).iterdir()}

os.fsync = lambda file: None  # slow, and of use only where the machine goes down, too
prepare("straight", -1)
straight, killed, partial = files("straight"), 0, 0
for survives in itertools.count(0, int(sys.argv[2])):
    if status("killed", survives) == 0:
        break
    killed += 1
    now = files("killed")
    assert not {name for name in now if name.endswith(".bin")} - set(straight)
    assert all(data == straight[name] for name, data in now.items() if name.endswith((".bin", ".npy"))), survives
    partial += "progress.json" in now
    assert status("killed", -1) == 0
    assert files("killed") == straight, survives
    shutil.rmtree(folder / "killed")
starts = 1
while status("often", 40):
    starts += 1
assert files("often") == straight
print(json.dumps([killed, partial, starts]))
"""


def test_a_killed_run_goes_on_without_loss_or_repeat(tmp_path, room_alone):
    write_lines(tmp_path / "a.jsonl", TEXTS[:25])
    write_lines(tmp_path / "b.jsonl", TEXTS[25:])
    command = [sys.executable, "-c", room_alone + KILLED, str(tmp_path), "5"]  # at every fifth write to the disk
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    killed, partial, starts = json.loads(result.stdout)
    assert killed > 35 and partial > 30 and starts > 3


class Pool:
    def submit(self, call, chunk):
        future = Future()
        future.set_result(chunk)
        return future


class DyingPool:
    def submit(self, call, chunk):
        future = Future()
        future.set_exception(BrokenProcessPool())
        return future


def test_processes_that_die_with_a_request_to_stop_are_no_failure():
    assert list(_in_order(DyingPool(), iter(range(9)), 5, lambda: True)) == []
    with pytest.raises(RunError, match="a process that encodes was killed"):
        list(_in_order(DyingPool(), iter(range(9)), 5, lambda: False))


def test_no_more_is_read_than_the_workers_will_soon_need():
    work = iter(range(100))
    results = _in_order(Pool(), work, 5, lambda: False)
    assert next(results) == 0
    assert next(work) == 6
    assert list(results) == [*range(1, 6), *range(7, 100)]


MEMORY = """
import json, pathlib, resource, sys
from ddl_jax.config.preparation import PreparationConfig
from ddl_jax.data.preparation import prepare_shards
folder, copies = pathlib.Path(sys.argv[1]), int(sys.argv[2])
with open(folder / f"{copies}.jsonl", "w") as file:
    for number in range(400 * copies):
        file.write(json.dumps({"text": f"{number} " + "text " * 2000}) + chr(10))
config = PreparationConfig((f"{folder}/{copies}.jsonl",), f"{folder}/{copies}", "bytes", "text", 0.01, 10**6)
assert prepare_shards(config, lambda: False, lambda *_: None)["train_documents"] > 390 * copies
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_corpus(tmp_path, room_alone):
    peaks = []
    for copies in (1, 10):  # 4 and 40 MB of text
        command = [sys.executable, "-c", room_alone + MEMORY, str(tmp_path), str(copies)]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout))
    assert peaks[1] - peaks[0] < 8 * 1024, f"{peaks} KB"  # of 36 MB more; an allocator keeps a few


# ---- what is refused, and what is left


def test_input_that_cannot_be_used_leaves_nothing(tmp_path):
    write_lines(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "b.jsonl").write_text('{"text": "fine"}\n{"text": 3}\n')
    config = settings(tmp_path, "deep/out", shard_tokens=10**6)
    assert "b.jsonl', line 2: field 'text' is 3, not text" in refusal(config)
    assert "b.jsonl', line 2: field 'text' is 3, not text" in refusal(dataclasses.replace(config, workers=1))
    assert "no file" in refusal(dataclasses.replace(config, sources=(str(tmp_path / "c*"),)))
    missing = refusal(dataclasses.replace(config, tokenizer="missing.json"))
    assert missing.startswith("--tokenizer 'missing.json' is not a file")
    (tmp_path / "b.jsonl").write_text('{"text": " "}\n' * 3)
    only = dataclasses.replace(config, sources=(str(tmp_path / "b.jsonl"),))
    assert "holds no text to train on: of 3 documents 3 are empty and 0 are held out" in refusal(only)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]


@pytest.mark.usefixtures("small_chunks")
def test_after_a_bad_document_the_mended_file_goes_on(tmp_path):
    write_lines(tmp_path / "a.jsonl", TEXTS)
    run(settings(tmp_path, "straight"))
    data = (tmp_path / "a.jsonl").read_bytes()
    begin = data.index(b"document 40")
    (tmp_path / "a.jsonl").write_bytes(data[:begin] + b"\xff" + data[begin:])
    for _ in range(2):
        assert "a.jsonl', line 41 is not UTF-8" in (message := refusal(settings(tmp_path)))
        assert message.endswith("what was done before is kept, and the same command goes on from there")
    kept = files(tmp_path / "out")
    assert "index.json" not in kept and "tokens_train_000000.bin" in kept
    (tmp_path / "a.jsonl").write_bytes(data.replace(b"document 2 ", b"document 3 "))
    assert "a.jsonl' is not what --out" in refusal(settings(tmp_path))
    assert files(tmp_path / "out") == kept
    (tmp_path / "a.jsonl").write_bytes(data)
    run(settings(tmp_path))
    first, second = files(tmp_path / "straight"), files(tmp_path / "out")
    assert first == second


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("finished", [False, True])
def test_a_changed_command_in_the_same_folder_is_refused(tmp_path, finished):
    write_lines(tmp_path / "a.jsonl", TEXTS)
    config = settings(tmp_path)
    run(config, stop_after=10**9 if finished else 5)
    before = files(tmp_path / "out")

    def says(**changes) -> str:
        return refusal(dataclasses.replace(config, **changes)).partition("was begun with another ")[2]

    assert says(tokenizer="gpt2").startswith("tokenizer's name (was 'bytes', now 'gpt2'); use another folder")
    assert says(shard_tokens=301).startswith("shard tokens (was 300, now 301)")
    assert says(validation_fraction=0.3).startswith("validation fraction (was 0.2, now 0.3)")
    assert says(text_field="body").startswith("text field (was 'text', now 'body')")
    write_lines(tmp_path / "b.jsonl", TEXTS)
    assert says().startswith("sources (was '1 files', now '2 files')")
    assert says(sources=(str(tmp_path / "b.jsonl"),)).endswith("b.jsonl'); use another folder, or the recorded values")
    (tmp_path / "b.jsonl").unlink()
    (tmp_path / "a.jsonl").write_text("")
    assert "a.jsonl' is not what --out" in refusal(config)
    assert files(tmp_path / "out") == before


def test_a_folder_in_use_or_of_someone_else_is_refused(tmp_path):
    write_lines(tmp_path / "a.jsonl", TEXTS)
    with OutputFolder(str(tmp_path / "out")):
        assert "is in use by another process; use another folder, or wait" in refusal(settings(tmp_path))
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "tokenizer.json").write_text("theirs")
    assert "holds 'tokenizer.json', but no shards of ours" in refusal(settings(tmp_path, "theirs"))
    assert files(tmp_path / "theirs") == {"tokenizer.json": b"theirs"}
    (tmp_path / "theirs" / ".ddl-prepare").touch()  # so it is ours, of a start that was killed before it recorded
    (tmp_path / "theirs" / "tokens_train_000000.bin.partial").write_text("begun")
    run(settings(tmp_path, "theirs"))
    run(settings(tmp_path, "new"))
    assert files(tmp_path / "theirs") == files(tmp_path / "new")
    for out in ("a.jsonl", "a.jsonl/below"):
        assert "is not a folder; use another folder" in refusal(settings(tmp_path, out))
    nowhere = dataclasses.replace(settings(tmp_path), out="/proc/1/out")
    assert "cannot be written: " in refusal(nowhere)


@pytest.mark.usefixtures("small_chunks")
def test_a_damaged_folder_is_refused(tmp_path):
    write_lines(tmp_path / "a.jsonl", TEXTS)
    config = settings(tmp_path)
    run(config, stop_after=12)
    journal = tmp_path / "out" / "progress.json"
    written = journal.read_text()
    for damaged in ('{"format": "ddl-shards-1"}', '{"format": "ddl-shards-1", "settings": {}, "progress": {}}'):
        journal.write_text(damaged)
        assert "progress.json is damaged" in refusal(config)
    journal.write_text(written)
    (partial,) = (tmp_path / "out").glob("tokens_train_*.bin.partial")
    partial.write_bytes(partial.read_bytes()[:-1])
    assert "is shorter than recorded" in refusal(config)
    (tmp_path / "out" / "tokens_train_000000.bin").unlink()
    assert "tokens_train_000000.bin' is missing" in refusal(config)


@pytest.mark.usefixtures("small_chunks")
def test_a_full_disk_is_said_and_the_same_command_goes_on(tmp_path):
    write_lines(tmp_path / "a.jsonl", TEXTS)
    config = settings(tmp_path, shard_tokens=2000)
    run(dataclasses.replace(config, out=str(tmp_path / "straight")))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    messages = []
    for size in (1000, 3000):  # too small for a header, and for a shard
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            messages.append(refusal(config, RunError))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert not list(tmp_path.glob("out/*.bin"))
    assert all("partial failed: File too large; the same command goes on" in message for message in messages)
    run(config)
    assert files(tmp_path / "out") == files(tmp_path / "straight")


@pytest.mark.usefixtures("small_chunks")
def test_a_process_that_is_killed_is_said_and_the_same_command_goes_on(tmp_path):
    write_lines(tmp_path / "a.jsonl", TEXTS)
    config, deaf = settings(tmp_path, workers=1), []

    def kill(*_) -> None:
        for process in multiprocessing.active_children():
            blocked = Path(f"/proc/{process.pid}/status").read_text().partition("SigBlk:")[2].split()[0]
            deaf.append(bool(int(blocked, 16) >> (signal.SIGINT - 1) & 1))
            os.kill(process.pid, signal.SIGKILL)

    with pytest.raises(RunError, match="a process that encodes was killed, .* fewer --workers if need be"):
        prepare_shards(config, lambda: False, kill)
    assert deaf and all(deaf), "Ctrl-C is for the parent alone"
    run(dataclasses.replace(config, workers=0))
    run(settings(tmp_path, "straight"))
    assert files(tmp_path / "out") == files(tmp_path / "straight")
