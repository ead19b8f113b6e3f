"""`ddl prepare` as it is typed: what it prints and returns, what it refuses, and signals to it and its processes."""

import contextlib
import json
import os
from pathlib import Path
from pydoc_data.topics import topics
import re
import signal
import subprocess
import sys
import time

import pytest

from ddl_jax.command_line import exit_code
from ddl_jax.config import DataConfig
from ddl_jax.data import prepare as prepare_corpus
from ddl_jax.data import train_batches
from ddl_jax.prepare import main

ROOT = Path(__file__).parent.parent
TEXTS = [topics[name] for name in sorted(topics)]


@pytest.fixture
def source(tmp_path) -> str:
    path = tmp_path / "topics.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return str(path)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    code = exit_code(lambda: main([*arguments]))
    return code, *capsys.readouterr()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_it_prints_and_that_it_is_done_once(tmp_path, source, capsys):
    command = [source, "--out", str(tmp_path / "out"), "--tokenizer", "bytes", "--validation-fraction", "0.1"]
    command += ["--workers", "0"]
    code, out, err = run(capsys, *command, "--json")
    result = json.loads(out)
    assert (code, err) == (0, "")
    assert result["train_documents"] + result["validation_documents"] == len(TEXTS)
    assert result["text_bytes"] == sum(len(text.encode()) for text in TEXTS)
    tokens = result["train_tokens"] + result["validation_tokens"]
    assert tokens == result["text_bytes"] + len(TEXTS)
    assert result["tokens_per_second"] == pytest.approx(tokens / result["seconds"])
    written = files(tmp_path / "out")
    code, out, err = run(capsys, *command)
    assert (code, err) == (0, "")
    assert f"train tokens          {result['train_tokens']:,}\n" in out and "tokens per second     0\n" in out
    assert files(tmp_path / "out") == written


def test_without_a_terminal_it_says_now_and_then_how_far_it_is(tmp_path, source, capsys, monkeypatch):
    monkeypatch.setattr("ddl_jax.prepare.SAID_EVERY", 0.0)
    command = [source, "--out", str(tmp_path / "out"), "--tokenizer", "bytes", "--workers", "0", "--json"]
    code, out, err = run(capsys, *command, "--validation-fraction", "0")
    size = os.path.getsize(source) / 1e6
    tokens = json.loads(out)["train_tokens"]
    assert code == 0 and re.fullmatch(
        rf"read {size:.1f} of {size:.1f} MB   {tokens:,} tokens   [\d,]+ tokens/s   0 s left", err.splitlines()[-1]
    )


def test_an_empty_validation_set_is_said_in_one_line(tmp_path, source, capsys):
    command = [source, "--out", str(tmp_path / "out"), "--tokenizer", "bytes", "--workers", "0"]
    code, _, err = run(capsys, *command, "--validation-fraction", "1e-9")
    assert code == 0
    assert err.startswith(f"none of {len(TEXTS)} documents was held out at --validation-fraction 1e-09; training will")
    assert err.count("\n") == 1
    command[2] += "2"
    assert run(capsys, *command, "--validation-fraction", "0")[2] == "", "it was asked for"


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["a"], "--out is missing, e.g. --out shards"),
        (["a", "--out", "b"], "--tokenizer is missing, e.g. --tokenizer gpt2"),
        (["--out", "b", "--tokenizer", "gpt2"], "SOURCE is missing; name files, e.g. 'fineweb/*.parquet'"),
        (["", "--out", "b", "--tokenizer", "gpt2"], "SOURCE '' names no file"),
        (["a", "--out", "", "--tokenizer", "gpt2"], "--out must name a folder"),
        (["a", "--out", "b", "--tokenizer", "gpt3"], "--tokenizer 'gpt3' is not a tokenizer; use 'bytes', 'gpt2' or"),
        (["a", "--out", "b", "--tokenizer", "bpe"], "--tokenizer 'bpe' is trained on text, which is not done here"),
        (["--shard-tokens", "0"], "--shard-tokens 0 must lie in [1, 2147483647]; nearest: 1"),
        (["--shard-tokens", "1e8"], "--shard-tokens '1e8' must be a whole number"),
        (["--validation-fraction", "1"], "--validation-fraction 1.0 must lie in [0, 0.9]; nearest: 0.9"),
        (["--validation-fraction", "nan"], "--validation-fraction nan must lie in [0, 0.9]; nearest: 0"),
        (["--workers", "-1"], "--workers -1 must lie in [0, 1024]; nearest: 0"),
        (["--text-field", ""], "--text-field must name a column or field"),
        (["--shard-token", "1"], "unknown option '--shard-token'; did you mean '--shard-tokens'?"),
        ([], "SOURCE[0] 'a' matches no file; a relative pattern starts at"),
    ],
)
def test_a_bad_command_line(tmp_path, monkeypatch, capsys, arguments, expected):
    monkeypatch.chdir(tmp_path)
    if not arguments or (arguments[0].startswith("--") and arguments[0] != "--out"):
        arguments = ["a", "--out", "b", "--tokenizer", "gpt2", *arguments]
    code, out, err = run(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {expected}")
    assert not list(tmp_path.iterdir())


def test_help_and_refusals_load_nothing_heavy():
    program = (
        "import sys; from ddl_jax.__main__ import dispatch\n"
        "try: dispatch(['prepare', '--help'])\n"
        "except SystemExit as end: print(end.code)\n"
        "print([n for n in ('jax', 'numpy', 'pyarrow', 'tokenizers', 'grain') if n in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout.endswith("0\n[]\n"), result
    for option in ("--out", "--tokenizer", "--text-field", "--validation-fraction", "--shard-tokens", "--workers"):
        assert f"{option} " in result.stdout


def test_a_full_disk_has_exit_code_1(tmp_path, source, capsys, monkeypatch):
    def full(file):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    command = [source, "--out", str(tmp_path / "out"), "--tokenizer", "bytes", "--workers", "0"]
    code, out, err = run(capsys, *command)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("failed: writing ") and "No space left on device; the same command goes on" in err
    assert not (tmp_path / "out").exists()


def test_its_shards_are_what_training_reads(tmp_path, source, capsys):
    command = [source, "--out", str(tmp_path / "out"), "--tokenizer", "gpt2", "--validation-fraction", "0.1"]
    assert run(capsys, *command, "--workers", "0")[0] == 0
    data = DataConfig(corpus="shards", paths=(str(tmp_path / "out" / "*.bin"),), tokenizer="gpt2")
    corpus = prepare_corpus(data.resolve(), 64, tmp_path / "run")
    tokens = corpus.train.stretches[0].map()
    texts = [text.strip() for text in corpus.tokenizer.decode(tokens).split("\n") if text.strip()]
    assert all(line in "\n".join(TEXTS) for line in texts[:100])
    with train_batches(corpus.train, 64, 4, seed=0) as batches:
        assert next(batches)["tokens"].shape == (4, 64)


def wait_for(happened, what: str) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def test_signals_to_it_and_its_processes(tmp_path, capsys):
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps({"text": f"{copy} {text}"}) + "\n" for copy in range(3) for text in TEXTS))
    arguments = [str(source), "--out", str(out), "--tokenizer", "gpt2", "--shard-tokens", "20000"]
    command = [sys.executable, "-m", "ddl_jax", "prepare", *arguments, "--workers", "2"]
    journal = out / "progress.json"

    def recorded() -> tuple:
        with contextlib.suppress(FileNotFoundError):
            return journal.stat().st_mtime_ns, journal.stat().st_ino
        return ()

    def signalled(number: int) -> tuple[int, str]:
        """Once more is recorded, the signal goes to all processes, as from a terminal or a scheduler; or kills one."""
        before = recorded()
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
        wait_for(lambda: recorded() != before, "nothing is recorded")
        (os.kill if number == signal.SIGKILL else os.killpg)(process.pid, number)
        _, err = process.communicate(timeout=60)

        def gone() -> bool:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 0)
                return False
            return True

        wait_for(gone, "processes are left")
        return process.returncode, err

    assert signalled(signal.SIGKILL)[0] == -signal.SIGKILL
    for number in (signal.SIGINT, signal.SIGTERM):
        code, err = signalled(number)
        assert code == 3, err
        assert err.strip().splitlines() == [
            "stopping in good order; Ctrl-C once more stops at once",
            f"stopped; the same command goes on in {out}",
        ]
    assert run(capsys, *arguments, "--workers", "0")[0] == 0
    arguments[2] = str(tmp_path / "straight")
    assert run(capsys, *arguments, "--workers", "0")[0] == 0
    assert files(out) == files(tmp_path / "straight")
