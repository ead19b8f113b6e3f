"""A study of real runs: measured, one arm diverging, killed and gone on with."""

import json
import os
from pathlib import Path
import subprocess
import sys
import time

import pytest
import yaml

from ddl_jax.studies.design import PlannedRun, final_loss
from tests.training.runs import ROOT, environment

EXPERIMENT = {
    "model": {"layers": 1, "width": 16, "heads": 2, "context_length": 16, "residual": {"kind": "additive"}},
    "data": {"corpus": "pydoc", "tokenizer": "bytes"},
    "optimizer": {"learning_rate": 1e-3, "warmup_steps": 0},
    "training": {"steps": 3, "batch_size": 2, "log_every": 1, "evaluate_every": 2, "evaluation_batches": 2},
}
STUDY = {
    "question": "Does it go on?",
    "experiments": {"tiny": "tiny.yaml"},
    "baseline": "plain",
    "reference": "plain",
    "seeds": [0],
    "readings": [{"budget": "tokens", "seeds": 1}],
    "arms": {"plain": {}, "broken": {"optimizer": {"weight_decay": 1e38}}},
}
PLAIN, BROKEN = (PlannedRun(arm, 3, 1e-3, 0) for arm in ("plain", "broken"))


def test_killed_and_gone_on_with(tmp_path):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    out = tmp_path / "out"
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY | {"run_dir": str(out)}, sort_keys=False))
    command = [sys.executable, "-m", "ddl_jax", "study", "run", str(tmp_path / "study.yaml")]
    env = environment() | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # quick to compile
    options = {"cwd": ROOT, "env": env, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*command, "--jobs", "1"], **options) as first:
        try:
            wait_for(lambda: BROKEN.beside(out, "log").exists() and workers(out), first)
        finally:
            first.kill()
    wait_for(lambda: not workers(out))
    assert "diverged" not in BROKEN.beside(out, "log").read_text(), "the worker went on by itself to the end of its run"
    assert final_loss(PLAIN.folder(out), 3) == pytest.approx(5.5, abs=0.5)
    files = [out / "measured.json", out / "initial.json", PLAIN.folder(out) / "metrics.jsonl"]
    before = [file.stat().st_mtime_ns for file in files]

    ended = subprocess.run(command, timeout=200, **options)
    assert ended.returncode == 0, ended.stdout
    assert "1 of 2 runs done, 1 diverged" in ended.stdout and "plain, seed 0, 3 steps at 0.001" not in ended.stdout
    assert [file.stat().st_mtime_ns for file in files] == before
    failure = json.loads(BROKEN.beside(out, "failed.json").read_text())
    assert failure["exit_code"] == 4 and failure["message"].startswith("diverged: ")
    costs = json.loads(files[0].read_text())["arms"]
    assert costs["plain"]["step_ratio"] == 1.0 and costs["broken"]["step_ratio"] > 0
    initial = json.loads(files[1].read_text())
    assert initial["plain"] == initial["broken"] and initial["plain"]["loss"] == pytest.approx(5.5, abs=0.5)


def workers(out: Path) -> list[int]:
    """The processes that train in the study's folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if b"ddl_jax.studies.worker" in words and os.fsencode(out) in words:
            found.append(int(process.name))
    return found


def wait_for(holds, process: subprocess.Popen | None = None) -> None:
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() - begun < 120
        if process is not None and process.poll() is not None:
            raise AssertionError(process.communicate()[0])
        time.sleep(0.02)
