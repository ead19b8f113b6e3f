"""Stopped and resumed equals straight: parameters, optimiser state, data and learning rate, bit for bit."""

import dataclasses
import logging
import os
from pathlib import Path
import signal

import numpy as np
import pytest

from ddl_jax.config.files import dump_config
from ddl_jax.training import loop, train
from ddl_jax.training.checkpoint import Checkpoints
from ddl_jax.training.run_directory import RunDirectory
from tests.training.runs import (
    BATCH,
    CONTEXT,
    EPOCH,
    STEPS,
    exact_metrics,
    final_state,
    metrics,
    python,
    tiny_config,
)

# Trains as the configuration file says, and dies by kill -9 while it logs the given step.
KILLED = """
import os, signal, sys
from ddl_jax.config.files import from_settings, load_file, typed_settings
from ddl_jax.training import train
from ddl_jax.training.run_directory import RunDirectory

log, fatal = RunDirectory.log, int(sys.argv[2])

def log_and_die(run, record):
    log(run, record)
    if record["step"] == fatal:
        os.kill(os.getpid(), signal.SIGKILL)

RunDirectory.log = log_and_die
sys.exit(train(from_settings(typed_settings(load_file(sys.argv[1]))).resolve()))
"""


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run that nothing disturbs, and the folder it lies in."""
    folder = tmp_path_factory.mktemp("runs")
    config = tiny_config(folder, "straight")
    assert train(config) == 0
    return config, folder


def assert_same(straight, resumed) -> None:
    assert exact_metrics(resumed) == exact_metrics(straight)
    for one, other in zip(final_state(straight), final_state(resumed), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_tiny_run_has_the_epochs_that_the_tests_are_about(straight):
    config, _ = straight
    tokens = 7 * 101  # documents and separators, one of the eight held out
    assert (tokens - 1) // CONTEXT // BATCH == EPOCH - 1 or (tokens - 1) // CONTEXT == EPOCH * BATCH
    records = metrics(config)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert records[-1]["validation_loss"] > 0
    assert len({record["loss"] for record in records}) == STEPS


def test_killed_at_several_steps_and_around_the_epoch_boundary(straight, tmp_path):
    """kill -9 before the first checkpoint, before, at and after the epoch boundary, and in the second epoch; the last
    part runs with worker processes. A checkpoint at the epoch boundary must not skip the next epoch."""
    config, folder = straight
    resumed = tiny_config(folder, "killed", checkpoint_every=1)
    file = tmp_path / "killed.yaml"
    file.write_text(dump_config(resumed))
    for fatal in (1, EPOCH - 1, EPOCH, EPOCH + 1, 2 * EPOCH - 3):
        assert python(KILLED, str(file), str(fatal)).returncode == -signal.SIGKILL
    with_workers = dataclasses.replace(resumed, data=dataclasses.replace(resumed.data, workers=2))
    file.write_text(dump_config(with_workers))
    ended = python(KILLED, str(file), "-1")
    assert ended.returncode == 0, ended.stderr
    assert "resumed at step" in ended.stdout
    assert "Error" not in ended.stderr and "Warning" not in ended.stderr
    assert_same(config, resumed)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_request_saves_and_the_same_command_goes_on(straight, monkeypatch, capsys, number):
    config, folder = straight
    resumed = tiny_config(folder, f"stopped-{number}", checkpoint_every=1000)
    log = RunDirectory.log

    def log_and_ask(run, record):
        log(run, record)
        if record["step"] == 5:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "log", log_and_ask)
        assert train(resumed) == 3
    assert signal.getsignal(number) is before
    assert "step 5 is saved" in capsys.readouterr().out
    assert train(resumed) == 0
    assert_same(config, resumed)
    assert train(resumed) == 0  # nothing left to do
    assert "complete" in capsys.readouterr().out
    assert_same(config, resumed)


def test_another_microbatch_size_and_other_cadences_may_resume(straight):
    config, folder = straight
    first = tiny_config(folder, "smaller", steps=STEPS)
    stop_after(first, 6)
    changed = tiny_config(folder, "smaller", microbatch_size=2, log_every=2, evaluate_every=5, checkpoint_every=4)
    assert train(changed) == 0
    # Another order of summation and nothing else. Compared soon after: AdamW divides by tiny gradients, so that the
    # last digits grow into more with every step.
    losses = [{record["step"]: record["loss"] for record in metrics(run)} for run in (config, changed)]
    np.testing.assert_allclose(losses[1][8], losses[0][8], rtol=1e-5)
    assert {8, 10, 15, 20, STEPS} <= losses[1].keys() and not {7, 9, 11} & losses[1].keys()


def stop_after(config, step: int) -> None:
    """Trains until `step` is logged, then as after Ctrl-C."""
    log = RunDirectory.log

    def log_and_ask(run, record):
        log(run, record)
        if record["step"] == step:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDirectory, "log", log_and_ask)
        assert train(config) == 3


def damage_data_files(checkpoint: Path) -> None:
    files = [file for file in checkpoint.rglob("*") if file.is_file() and "d" in file.parent.parts]
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def remove_everything(checkpoint: Path) -> None:
    for file in checkpoint.rglob("*"):
        if file.is_file():
            file.unlink()


def overwrite_with_noise(checkpoint: Path) -> None:
    for file in checkpoint.rglob("*"):
        if file.is_file():
            file.write_bytes(np.random.default_rng(0).bytes(file.stat().st_size))


@pytest.mark.parametrize("damage", [damage_data_files, remove_everything, overwrite_with_noise])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(straight, capsys, damage):
    config, folder = straight
    resumed = tiny_config(folder, damage.__name__)
    stop_after(resumed, 8)
    checkpoints = Path(resumed.run_dir) / "checkpoints"
    assert sorted(int(path.name) for path in checkpoints.iterdir()) == [3, 6, 8]
    damage(checkpoints / "8")
    capsys.readouterr()
    assert train(resumed) == 0
    said = capsys.readouterr().out
    assert "checkpoint 8 cannot be read, falling back to checkpoint 6" in said and "resumed at step 6" in said
    assert (Path(resumed.run_dir) / "damaged_checkpoints" / "8").is_dir()  # set aside, not deleted
    assert_same(config, resumed)


def test_with_no_readable_checkpoint_the_run_does_not_start_over(straight, capsys):
    _, folder = straight
    config = tiny_config(folder, "hopeless")
    stop_after(config, 4)
    for checkpoint in (Path(config.run_dir) / "checkpoints").iterdir():
        overwrite_with_noise(checkpoint)
    before = metrics(config)
    capsys.readouterr()
    for _ in range(2):  # asking again does not help
        assert train(config) == 1
        error = capsys.readouterr().err
        assert "none of the checkpoints" in error and error.count("\n") == 1
        assert metrics(config) == before


def test_a_failed_save_stops_the_run_with_the_reason(straight, tmp_path):
    """'An asynchronous save failed and training went on.' Files are limited in size, as on a full disk."""
    _, folder = straight
    # One save, far from the end: the steps after it must notice, not the next save.
    config = tiny_config(folder, "full", steps=3000, log_every=500, evaluate_every=3000, checkpoint_every=1000)
    file = tmp_path / "full.yaml"
    file.write_text(dump_config(config))
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n" + KILLED
    ended = python(code, str(file), "-1")
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("failed: ")]
    assert "saving a checkpoint in " in line and "File too large" in line
    assert 1000 <= metrics(config)[-1]["step"] < 2000


def test_the_storage_does_not_print_around_that_line(tmp_path, caplog):
    """What its threads log after a failed write, and when, is a matter of luck: so each kind by itself."""
    with Checkpoints(tmp_path / "checkpoints", print):
        logging.getLogger("asyncio").error("Task exception was never retrieved")
        logging.getLogger("asyncio").error("something else")
        record = logging.LogRecord("absl", logging.ERROR, "/lib/orbax/checkpoint/x.py", 1, "failed", (), None)
        other = logging.LogRecord("absl", logging.ERROR, "/lib/grain/x.py", 1, "failed", (), None)
        assert not logging.getLogger("absl").filter(record) and logging.getLogger("absl").filter(other)
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == ["something else"]


def test_a_second_process_is_refused_while_the_first_trains(straight):
    from ddl_jax.errors import InputError

    config, _ = straight
    with RunDirectory(config), pytest.raises(InputError, match="in use by another process"):
        train(config)


def test_a_line_cut_short_by_a_crash_is_dropped(straight):
    config, folder = straight
    resumed = tiny_config(folder, "cut")
    stop_after(resumed, 7)
    file = Path(resumed.run_dir) / "metrics.jsonl"
    file.write_text(file.read_text() + '{"step": 8, "lo')
    assert train(resumed) == 0
    assert_same(config, resumed)


def test_exit_codes_are_those_of_the_contract():
    assert (loop.DONE, loop.FAILED, loop.STOPPED, loop.DIVERGED) == (0, 1, 3, 4)
