"""A run, loaded for use: its newest parameters on one device, whatever trained it, without a trace in its folder."""

import dataclasses
import os
from pathlib import Path
import re
import shutil
import sys
import types

from flax import nnx
import jax
import numpy as np
import pytest

from ddl_jax import load_run
from ddl_jax.config import Config
from ddl_jax.config.files import NEWER, dump_config, from_settings, load_file
from ddl_jax.errors import InputError
from ddl_jax.run import load_checkpoint
from ddl_jax.training import checkpoint
from ddl_jax.training.checkpoint import Checkpoints
from ddl_jax.training.sharding import make_mesh, placed_state
from tests.training.runs import final_state, metrics, tiny_config


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Names, sizes and times of all in a folder, and of itself."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in [folder, *folder.rglob("*")]}


def arrays(model: nnx.Module) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]


@pytest.fixture
def run(run_of_eight, tmp_path):
    """A copy of the run of eight devices, to be changed."""
    return Path(shutil.copytree(run_of_eight, tmp_path / "run"))


def edit(run: Path, **changes) -> Config:
    config = from_settings(load_file(run / "config.yaml"))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))
    (run / "config.yaml").write_text(dump_config(config))
    return config


def test_a_run_of_eight_devices_loads_on_one_and_leaves_no_trace(run_of_eight):
    before = snapshot(run_of_eight)
    model, tokenizer, config = load_run(run_of_eight)
    assert snapshot(run_of_eight) == before
    assert (config.mesh.data, config.mesh.fsdp) == (2, 4) and config.run_dir == str(run_of_eight)
    assert tokenizer.vocab_size == 257
    trained = final_state(config)[1 : 1 + len(arrays(model))]  # the state is its step, parameters, the optimiser's
    for found, expected in zip(arrays(model), trained, strict=True):
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)
    assert {leaf.sharding.device_set == {jax.local_devices()[0]} for leaf in jax.tree.leaves(nnx.state(model))} == {
        True
    }
    assert model(np.zeros((1, 3), np.int32)).shape == (1, 3, config.model.vocab_size)
    assert model.config == config.model


def test_the_step_is_that_of_the_newest_checkpoint(run_of_eight):
    assert load_checkpoint(run_of_eight)[1] == metrics(Config(run_dir=str(run_of_eight)))[-1]["step"] == 8


def test_the_optimiser_stays_on_disk(tmp_path):
    """Counted in bytes that this process reads: the moments are twice the parameters."""
    config = tiny_config(tmp_path)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, width=512, vocab_size=2048))
    state = placed_state(config, make_mesh(config, jax.devices()[:1]))
    rng = np.random.default_rng(0)  # of zeros, nothing would be stored
    state = jax.tree.map(lambda leaf: jax.device_put(rng.random(leaf.shape, np.float32).astype(leaf.dtype)), state)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(dump_config(config))
    with Checkpoints(tmp_path / "run" / "checkpoints", print) as checkpoints:
        checkpoints.save(3, state)

    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    start = read()
    loaded, step = load_checkpoint(tmp_path / "run")
    assert step == 3
    size = sum(array.nbytes for array in arrays(loaded.model))
    assert read() - start < 1.5 * size


def test_where_the_newest_cannot_be_read_an_older_one_is(run, capsys):
    for file in (run / "checkpoints" / "8" / "state").rglob("*"):
        if file.is_file():
            os.truncate(file, file.stat().st_size // 2)
    before = snapshot(run)
    _, step = load_checkpoint(run)
    assert step == 4 and snapshot(run) == before
    error = capsys.readouterr().err
    assert error.startswith("checkpoint 8 cannot be read: ") and error.endswith("; reading checkpoint 4\n")
    assert error.count("\n") == 1
    shutil.rmtree(run / "checkpoints" / "4" / "state")
    with pytest.raises(InputError, match="none of the checkpoints .* can be read: checkpoint 8 ") as refused:
        load_run(run)
    assert "\n" not in str(refused.value)


def test_arrays_whose_reading_was_given_up_say_nothing(monkeypatch):
    said = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    checkpoint._quieten_storage()
    for file, count in (("site-packages/orbax/checkpoint/serialization.py", 0), ("ours.py", 1)):
        names = {}
        exec(
            compile("async def read():\n try:\n  await wait()\n finally:\n  raise ValueError('cut')", file, "exec"),
            names,
        )
        names["wait"] = types.coroutine(lambda: (yield))
        reading = names["read"]()
        reading.send(None)
        del reading  # as where another array had failed already
        assert len(said) == count


def test_what_a_gpu_decided_is_decided_again(run):
    model, _, _ = load_run(run)
    edit(run, compute_dtype="bfloat16", state_dtype="bfloat16", attention="cudnn")
    here, _, config = load_run(run)
    assert (config.model.compute_dtype, config.model.state_dtype, config.model.attention) == ("float32",) * 2 + ("xla",)
    tokens = np.arange(12).reshape(2, 6)
    np.testing.assert_array_equal(here(tokens), model(tokens))


def without_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def half_saved(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "4")
    (run / "checkpoints" / "8").rename(run / "checkpoints" / "8.orbax-checkpoint-tmp")


def damaged(run: Path) -> None:
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("  width:", "  width"))


def cut(run: Path) -> None:
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("seed: 0\n", ""))


def with_tokenizer(run: Path) -> None:
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("tokenizer: bytes", "tokenizer: gpt2"))


REFUSED = {
    "no folder": (shutil.rmtree, "run' is not a folder"),
    "no run": (lambda run: (run / "config.yaml").unlink(), "holds no config.yaml"),
    "no checkpoint": (without_checkpoints, "no checkpoint yet"),
    "half a checkpoint": (half_saved, "no checkpoint yet"),
    "damaged": (damaged, "config.yaml: line "),
    "cut": (cut, "config.yaml lacks seed"),
    "another width": (lambda run: edit(run, width=16), "none of the checkpoints .* can be read: checkpoint 8 .*shape"),
    "no vocabulary": (lambda run: edit(run, vocab_size=None), "no model.vocab_size"),
    "no tokenizer": (with_tokenizer, "tokenizer.json is not a file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(run, case):
    change, expected = REFUSED[case]
    change(run)
    with pytest.raises(InputError, match=expected) as refused:
        load_run(run)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 1000


def test_a_run_from_before_a_setting_existed_is_what_the_setting_is_by_default(run):
    text = (run / "config.yaml").read_text()
    expected = load_run(run).config
    for key in NEWER:
        text, count = re.subn(rf"^ +{key.rpartition('.')[2]}: .*\n", "", text, flags=re.MULTILINE)
        assert count == 1, key
    (run / "config.yaml").write_text(text)
    assert load_run(run).config == expected
