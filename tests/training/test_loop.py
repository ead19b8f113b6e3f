"""The run as a whole: what it writes, what it refuses, how it ends when numbers break."""

import dataclasses
import json
import math
import os
from pathlib import Path
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddl_jax import data, evaluation
from ddl_jax.config import ResidualConfig
from ddl_jax.config.files import dump_config
from ddl_jax.errors import InputError
from ddl_jax.training import loop, train
from ddl_jax.training.run_directory import LOCK, RunDirectory
from tests.quick import quick_compilation
from tests.training.runs import ROOT, final_state, metrics, settled, tiny_config


@pytest.fixture(scope="module", autouse=True)
def compile_fast():
    """These tests train tiny models many times over, and most of that is compilation. (Those of resuming do not.)"""
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # for processes that a test starts
    with quick_compilation():
        yield
    del os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"]


def test_the_run_directory_is_that_of_the_contract(tmp_path, capsys):
    config = tiny_config(tmp_path, steps=6, log_every=4, evaluate_every=3, checkpoint_every=2)
    assert train(config) == 0
    run = Path(config.run_dir)
    records = metrics(config)
    assert [record["step"] for record in records] == [3, 4, 6]  # evaluations and every fourth
    for record in records:
        assert {"step", "tokens", "loss", "grad_norm", "learning_rate", "seconds", "tokens_per_second"} <= set(record)
        assert ("validation_loss" in record) == ("validation_bits_per_byte" in record) == (record["step"] % 3 == 0)
        assert record["tokens"] == record["step"] * 4 * 16
    assert sorted(int(path.name) for path in (run / "checkpoints").iterdir()) == [2, 4, 6]
    recorded = settled(config)
    assert recorded.model.vocab_size == 320 and recorded.model.compute_dtype == "float32"
    data = json.loads((run / "data.json").read_text())
    assert len(data["text_sha256"]) == 64 and data["tokenizer"] == "bytes"
    said = capsys.readouterr().out
    assert "Kernels: XLA: width 8 is not a multiple of 128; nearest: 128\n" in said
    for name in (str(run), "config.yaml", "metrics.jsonl", "checkpoints/", "--model.residual.kind write_only", "bench"):
        assert name in said


def test_a_bpe_run_keeps_its_tokenizer(tmp_path):
    config = tiny_config(tmp_path, steps=5)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer="bpe", vocabulary=270))
    assert train(config) == 0
    file = Path(config.run_dir) / "tokenizer.json"
    before = file.read_bytes()
    assert train(config) == 0
    assert file.read_bytes() == before
    file.write_text(file.read_text().replace('"a"', '"ä"'))
    with pytest.raises(InputError, match="tokenizer"):
        train(config)


def test_the_loop_uses_the_held_out_text_its_bytes_and_the_workers_asked_for(tmp_path, monkeypatch):
    """'Validation jumped', 'a flag read in one code path only': what the loop hands on, recorded."""
    seen = {}

    def validation_batches(tokens, *arguments):
        seen["validation"] = tokens
        return data.validation_batches(tokens, *arguments)

    def train_batches(tokens, *arguments, part):
        seen["train"], seen["workers"], seen["part"] = tokens, arguments[-1], part
        return data.train_batches(tokens, *arguments[:-1], part=part)

    def validate(nats, batches, byte_lengths):
        seen["byte_lengths"] = byte_lengths
        seen["batches"] = [*seen.get("batches", []), batches]
        return evaluation.validate(nats, batches, byte_lengths)

    for replacement in (validation_batches, train_batches, validate):
        monkeypatch.setattr(loop, replacement.__name__, replacement)
    config = tiny_config(tmp_path, steps=5, evaluate_every=2)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, workers=3))
    assert train(config) == 0
    corpus = data.prepare(config.data, 16, Path(config.run_dir))
    np.testing.assert_array_equal(seen["train"], corpus.train)
    np.testing.assert_array_equal(seen["validation"], corpus.validation)
    np.testing.assert_array_equal(seen["byte_lengths"], [1] * 256 + [0] * 64)  # a separator is no text
    assert seen["workers"] == 3 and seen["part"] == (0, 1)
    assert len(seen["batches"]) == 3 and all(batches is seen["batches"][0] for batches in seen["batches"])
    assert [record["step"] for record in metrics(config) if "validation_loss" in record] == [2, 4, 5]  # the last, too


def test_tensorboard_gets_the_same_numbers(tmp_path):
    config = tiny_config(tmp_path, steps=5)
    assert train(config) == 0
    (file,) = (Path(config.run_dir) / "tensorboard").iterdir()
    events = file.read_bytes()
    assert all(name.encode() in events for name in metrics(config)[-1].keys() - {"step"})


def test_a_finite_state_with_a_loss_that_is_not_is_never_saved(tmp_path, monkeypatch, capsys):
    """Finite parameters, finite gradients, and yet the next forward pass overflows."""
    config = tiny_config(tmp_path, checkpoint_every=1)
    make = loop.make_evaluation_step

    def overflowing(*arguments):
        step = make(*arguments)
        return lambda parameters, batch: step(parameters, batch) + jnp.where(broken[0], jnp.nan, 0.0)

    broken = [False]
    monkeypatch.setattr(loop, "make_evaluation_step", overflowing)
    # Unjitted, so that the evaluation can change its mind.
    monkeypatch.setattr(loop.jax, "jit", lambda f, **options: jit(f, **options) if options else f)
    log = RunDirectory.log

    def log_and_break(run, record):
        log(run, record)
        broken[0] = record["step"] == 4

    monkeypatch.setattr(RunDirectory, "log", log_and_break)
    assert train(config) == 4
    error = capsys.readouterr().err
    assert "step 4: the validation loss is nan" in error and "the last good checkpoint is step 3" in error


jit = jax.jit


def test_every_kind_learns(tmp_path):
    for kind in ("additive", "additive_expanded", "write_only", "delta"):
        config = tiny_config(tmp_path, kind, log_every=26)
        model = dataclasses.replace(config.model, residual=ResidualConfig(kind=kind))
        config = dataclasses.replace(config, model=model).resolve()
        assert train(config) == 0
        assert metrics(config)[-1]["loss"] < 0.9 * math.log(320)


def poisoned(make_train_step, when: int):
    """Training steps that turn to NaN at one step, as after an overflow."""

    def make(*arguments):
        step = make_train_step(*arguments)

        def poisoned_step(state, batch):
            poison = jnp.where(state.step == when - 1, jnp.nan, 0.0)
            new, values = step(state, batch)
            parameters = jax.tree.map(lambda leaf: leaf + poison, new.parameters)
            return new._replace(parameters=parameters), {name: value + poison for name, value in values.items()}

        return poisoned_step

    return make


@pytest.mark.parametrize("checkpoint_every", [1, 2])
def test_a_broken_step_stops_the_run_and_keeps_the_last_good_checkpoint(
    tmp_path, monkeypatch, capsys, checkpoint_every
):
    config = tiny_config(tmp_path, checkpoint_every=checkpoint_every, log_every=26)
    monkeypatch.setattr(loop, "make_train_step", poisoned(loop.make_train_step, when=6))
    assert train(config) == 4
    error = capsys.readouterr().err
    last = 5 if checkpoint_every == 1 else 4
    for part in ("step 6", "loss is nan", "likely cause", "learning_rate", f"the last good checkpoint is step {last}"):
        assert part in error
    assert error.count("\n") == 1
    assert all(np.isfinite(leaf).all() for leaf in final_state(config))


def test_a_run_that_blows_up_by_itself_is_stopped(tmp_path, capsys):
    config = tiny_config(tmp_path)
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, learning_rate=1e30))
    assert train(config) == 4
    assert "no checkpoint had been saved yet" in capsys.readouterr().err


def test_metrics_are_valid_json_even_then(tmp_path):
    config = tiny_config(tmp_path)
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, learning_rate=1e30))
    train(config)
    text = (Path(config.run_dir) / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text


def test_refusals_leave_nothing_behind(tmp_path):
    config = tiny_config(tmp_path)
    for change in (
        {"model": dataclasses.replace(config.model, context_length=5000)},
        {"model": dataclasses.replace(config.model, vocab_size=100)},
        {"data": dataclasses.replace(config.data, paths=(str(tmp_path / "nothing" / "*.txt"),))},
    ):
        with pytest.raises(InputError):
            train(dataclasses.replace(config, **change))
        assert not Path(config.run_dir).exists()


def test_a_changed_text_is_refused(tmp_path):
    config = tiny_config(tmp_path, steps=5)
    assert train(config) == 0
    text = tmp_path / "corpus" / "3.txt"
    text.write_text(text.read_text()[::-1])
    with pytest.raises(InputError, match="text_sha256"):
        train(config)


def test_a_folder_that_is_no_run_is_left_alone(tmp_path):
    config = tiny_config(tmp_path)
    run = Path(config.run_dir)
    run.mkdir()
    (run / "metrics.jsonl").write_text("mine\n")
    with pytest.raises(InputError, match="holds metrics.jsonl, but is no run of ours"):
        train(config)
    assert [file.name for file in run.iterdir()] == ["metrics.jsonl"]
    assert (run / "metrics.jsonl").read_text() == "mine\n"


def test_what_a_killed_start_left_behind_does_not_stand_in_the_way(tmp_path):
    config = tiny_config(tmp_path, steps=5)
    run = Path(config.run_dir)
    run.mkdir()
    for name in (LOCK, "tokenizer.json", "config.yaml", "config.yaml.77.partial"):
        (run / name).write_text("half")
    assert train(config) == 0
    assert not (run / "tokenizer.json").exists() and not (run / "config.yaml.77.partial").exists()


@pytest.mark.parametrize("name", ["data.json", "config.yaml"])
@pytest.mark.parametrize("damage", ["", "x", "{}", "[]"])
def test_a_damaged_record_is_refused(tmp_path_factory, finished_run, name, damage):
    file = Path(finished_run.run_dir) / name
    before = file.read_text()
    file.write_text(damage)
    with pytest.raises(InputError) as caught:
        train(finished_run)
    assert name in str(caught.value) and "\n" not in str(caught.value)
    file.write_text(before)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    config = tiny_config(tmp_path_factory.mktemp("finished"), steps=5)
    assert train(config) == 0
    return config


def test_lost_checkpoints_do_not_cost_the_metrics(tmp_path, capsys):
    config = tiny_config(tmp_path, steps=5)
    assert train(config) == 0
    before = metrics(config)
    shutil.rmtree(Path(config.run_dir) / "checkpoints")
    assert train(config) == 0
    assert "5 logged steps after step 0 are done again" in capsys.readouterr().out
    redone = (Path(config.run_dir) / "metrics_redone.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in redone] == before


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path):
    config = tiny_config(tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    run = f"set -o pipefail; {sys.executable} train.py --config {file} | head -1"
    assert subprocess.run(["bash", "-c", run], cwd=ROOT, capture_output=True, timeout=300).returncode == 0
    assert metrics(config)[-1]["step"] == config.training.steps


def test_a_request_before_jax_is_loaded_is_heard(tmp_path):
    """Ctrl-C within the first second used to be swallowed by an import."""
    config = tiny_config(tmp_path, steps=10_000, log_every=1000, evaluate_every=10_000, checkpoint_every=10_000)
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    command = [sys.executable, "train.py", "--config", str(file)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while "jaxlib" not in Path(f"/proc/{process.pid}/maps").read_text():  # until the import has begun
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    said, error = process.communicate(timeout=120)
    assert process.returncode == 3, error
    assert "before the first step" in said and error.strip() == "stopping in good order; Ctrl-C once more stops at once"


@pytest.mark.parametrize("where", ["/proc/run", "file/run"])
def test_an_unwritable_run_dir_is_refused(tmp_path, where):
    (tmp_path / "file").write_text("in the way")
    config = dataclasses.replace(tiny_config(tmp_path), run_dir=str(tmp_path / where))
    with pytest.raises(InputError, match="cannot be written"):
        train(config)
