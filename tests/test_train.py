"""`python train.py`: what only the world can tell is wrong ends with one line and exit code 2, and leaves nothing."""

from pathlib import Path
import subprocess
import sys

import pytest

ROOT = Path(__file__).parent.parent
TEXT = "words, words and words. " * 40


@pytest.fixture
def folder(tmp_path):
    for index in range(4):
        (tmp_path / f"{index}.txt").write_text(f"{index} {TEXT}")
    (tmp_path / "latin.bin").write_bytes(b"caf\xe9 " * 200)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text("")
    (tmp_path / "in_the_way").write_text("a file")
    return tmp_path


REFUSED = {
    "missing corpus": (["--data.paths", "{}/nothing/*.txt"], "data.paths"),
    "empty corpus": (["--data.paths", "{}/empty/*.txt"], "empty"),
    "not UTF-8": (["--data.paths", "{}/latin.bin"], "UTF-8"),
    "context too long": (["--model.context_length", "90000"], "nearest: "),
    "vocabulary too small": (["--model.vocab_size", "100"], "nearest: 257"),
    "missing tokenizer": (["--data.tokenizer", "{}/none.json"], "none.json"),
    "no such user": (["--run_dir", "~nobodyhere/x"], None),
    "unwritable": (["--run_dir", "{}/in_the_way/run"], "use another run_dir"),
    "a file": (["--run_dir", "{}/in_the_way"], "is not a folder"),
    "a very long name": (["--run_dir", "{}/" + 300 * "x"], "use another run_dir"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(folder, case):
    arguments, expected = REFUSED[case]
    before = sorted(folder.rglob("*"))
    command = [sys.executable, str(ROOT / "train.py"), "--data.corpus", "files", "--data.paths", f"{folder}/?.txt"]
    command += ["--run_dir", f"{folder}/new/run", "--training.steps", "2", "--optimizer.warmup_steps", "1"]
    command += [argument.replace("{}", str(folder)) for argument in arguments]
    if expected is None:
        command += ["--model.vocab_size", "1"]  # so that it ends here even where the folder could be made
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1
    assert ended.stdout == "" and (expected or "") in ended.stderr
    assert sorted(folder.rglob("*")) == before


def test_a_configuration_of_another_run_is_refused(folder):
    def train(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "train.py", "--data.corpus", "files", "--data.paths", f"{folder}/?.txt"]
        command += ["--run_dir", f"{folder}/run", "--training.steps", "2", "--optimizer.warmup_steps", "1"]
        command += ["--model.layers", "1", "--model.width", "8", "--model.context_length", "8"]
        return subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)

    assert train().returncode == 0
    ended = train("--model.width", "16")
    assert ended.returncode == 2
    assert "model.width (was 8, now 16)" in ended.stderr and ended.stderr.count("\n") == 1
