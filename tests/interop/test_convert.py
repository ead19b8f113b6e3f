"""`ddl convert`: official files into run directories and back, and what it says of those that it cannot use."""

import dataclasses
import json

from flax import nnx
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ddl_jax import Config, load_run
from ddl_jax.__main__ import dispatch
from ddl_jax.command_line import exit_code
from ddl_jax.config.files import from_settings, load_file
from ddl_jax.data import prepare
from ddl_jax.errors import InputError
from ddl_jax.interop import files, from_official, to_official
from ddl_jax.interop.options import official_options
from ddl_jax.training.checkpoint import Checkpoints
from ddl_jax.training.run_directory import RunDirectory
from ddl_jax.training.sharding import make_mesh, placed_state
from tests import official

OPTIONS = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "head_dim": 4, "vocab_size": 320,
           "block_size": 16, "ddl_value_channels": 2, "ddl_state_shortconv_kernel_size": 2}  # fmt: skip
VARIANT = "cc_ec"
TENSORS = official.random_tensors(VARIANT, OPTIONS)


def convert(*arguments):
    return exit_code(lambda: dispatch(["convert", *map(str, arguments)]))


def golden(path, **changes):
    """A file as the golden ones are."""
    about = {"variant": VARIANT.upper(), "config": OPTIONS, "resolved": official.DEFAULTS | OPTIONS}
    tensors = {f"param/{name}": a for name, a in (TENSORS | changes).items()}
    np.savez(path, config=json.dumps(about), logits=np.zeros(1), **tensors)
    return path


def replaced(config: Config, **sections) -> Config:
    """The configuration with some settings of some sections changed."""
    changed = {name: dataclasses.replace(getattr(config, name), **fields) for name, fields in sections.items()}
    return dataclasses.replace(config, **changed)


def assert_same(model, other):
    assert official_options(model.config) == official_options(other.config)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(other))


@pytest.mark.parametrize("ending", files.ENDINGS)
def test_into_a_run_directory_and_back(tmp_path, ending, capsys):
    run, out = tmp_path / "runs" / "official", tmp_path / f"out{ending}"
    assert convert(golden(tmp_path / "in.npz"), "--run", run) == 0
    assert capsys.readouterr().out.startswith(f"{run}: variant cc_ec, ")
    assert_same(load_run(run).model, from_official(OPTIONS, TENSORS, VARIANT))
    assert convert("--run", run, "--to", out) == 0
    weights = files.read_weights(out)
    assert weights.variant == VARIANT and weights.options.items() >= OPTIONS.items()
    assert json.loads((tmp_path / "out.json").read_text()) == weights.options
    expected = TENSORS | {"lm_head.weight": TENSORS["transformer.wte.weight"]}
    assert set(weights.tensors) == set(expected)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(weights.tensors[name], tensor)
    assert out.stat().st_mode == (tmp_path / "out.json").stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({"in.npz", "out.json", out.name, "runs"})


def test_a_safetensors_file_has_what_transformers_asks_for(tmp_path):
    model = from_official(OPTIONS, TENSORS, VARIANT)
    files.write_weights(tmp_path / "out.safetensors", files.Weights(*to_official(model)))
    with safe_open(tmp_path / "out.safetensors", framework="numpy") as file:
        assert file.metadata()["format"] == "pt"


@pytest.mark.parametrize("beside", ["config.json", "model.json", "elsewhere/options.json"])
def test_bfloat16_and_keyword_arguments_from_a_file_of_their_own(tmp_path, beside):
    tensors = {name: a.astype(ml_dtypes.bfloat16) for name, a in TENSORS.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / beside).write_text(json.dumps(OPTIONS))
    given = ["--official-config", tmp_path / beside] if beside.startswith("elsewhere") else []
    assert convert(tmp_path / "model.safetensors", "--variant", "CC_EC", "--run", tmp_path / "run", *given) == 0
    assert_same(load_run(tmp_path / "run").model, from_official(OPTIONS, tensors, VARIANT))


def test_a_converted_model_holds_out_no_text(tmp_path, capsys):
    assert convert(golden(tmp_path / "in.npz"), "--run", tmp_path / "run") == 0
    with pytest.raises(InputError, match="was converted and has not been trained here: it holds out no text; --no-va"):
        dispatch(["evaluate", "--run", str(tmp_path / "run")])


def test_gpt2_is_the_tokenizer_of_a_vocabulary_that_holds_it(tmp_path):
    options = OPTIONS | {"vocab_size": 50304}
    tensors = official.random_tensors(VARIANT, options)
    np.savez(tmp_path / "in.npz", **tensors)
    (tmp_path / "in.json").write_text(json.dumps(options))
    assert convert(tmp_path / "in.npz", "--variant", VARIANT, "--run", tmp_path / "run") == 0
    assert load_run(tmp_path / "run").tokenizer.encode("Hello world").tolist() == [15496, 995]


def test_training_goes_on_from_what_was_converted(tmp_path):
    """With data and a recipe of its own, but with the model as it is."""
    golden(tmp_path / "in.npz")
    assert convert(tmp_path / "in.npz", "--run", tmp_path / "run") == 0
    config = from_settings(load_file(tmp_path / "run" / "config.yaml"))
    (tmp_path / "a.txt").write_text("one text\n" * 50)
    (tmp_path / "b.txt").write_text("another text\n" * 50)
    changed = {"corpus": "files", "paths": (str(tmp_path / "*.txt"),), "validation_fraction": 0.5}
    config = replaced(config, data=changed, training={"steps": 7}, optimizer={"warmup_steps": 2}).resolve()
    with RunDirectory(config) as run:
        settled = run.settle(config)
        assert settled == config
        with pytest.raises(InputError, match=r"another configuration: model.qk_norm \(was true, now false\)"):
            run.settle(replaced(config, model={"qk_norm": False}))
        with pytest.raises(InputError, match=r"another configuration: data.tokenizer \(was 'bytes', now 'gpt2'\)"):
            run.settle(replaced(config, data={"tokenizer": "gpt2"}))
        corpus = prepare(settled.data, settled.model.context_length, run.path)
        run.begin(settled, corpus)
        run.begin(settled, corpus)  # and from now on it is a run like any other
        with pytest.raises(InputError, match=r"another configuration: training.steps \(was 7, now 8\)"):
            run.settle(replaced(config, training={"steps": 8}))
        with Checkpoints(run.checkpoints, print) as checkpoints:
            state = checkpoints.restore(placed_state(settled, make_mesh(settled)))
    assert int(state.step) == 0
    expected = nnx.state(from_official(OPTIONS, TENSORS, VARIANT))
    jax.tree.map(np.testing.assert_array_equal, state.parameters, expected)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(state.optimizer))


REFUSED = {
    "neither": (["--run", "new"], "give either FILE, official weights to read, or --to FILE"),
    "run": (["in.npz"], "--run is missing; name the run_dir to write"),
    "variant": (["plain.npz", "--run", "new"], "--variant is missing: plain.npz does not say which it is"),
    "unknown variant": (["in.npz", "--run", "new", "--variant", "cce"], "variant 'cce' is not known; did you mean 'cc"),
    "full": (["in.npz", "--run", "full"], "--run 'full' exists already; name a new folder"),
    "pickle": (["a.pt", "--run", "new"], "file 'a.pt' is a pickle, which can run any code and is not read; where PyT"),
    "ending": (["a.h5", "--run", "new"], "file 'a.h5' must end in .safetensors or .npz"),
    "missing": (["none.npz", "--run", "new"], "none.npz cannot be read: No such file or directory"),
    "damaged npz": (["damaged.npz", "--run", "new"], "damaged.npz is damaged or no .npz file: "),
    "pickled npz": (["pickled.npz", "--run", "new"], "pickled.npz is damaged or no .npz file: Object arrays cannot"),
    "damaged": (["damaged.safetensors", "--run", "new"], "damaged.safetensors is damaged or no .safetensors file: "),
    "options": (["in.npz", "--run", "new", "--official-config", "list.json"], "list.json is damaged or no .json file"),
    "tensor": (["short.npz", "--run", "new"], "the official tensors do not fit the options; missing: ln_f.weight"),
    "beside": (
        ["beside.npz", "--run", "new", "--variant", VARIANT],
        "official.hiden_size is not an option; did you mean 'hidden_size'? (Keyword arguments from beside.json)",
    ),
    "described": (["described.npz", "--run", "new"], "described.npz is damaged or no .npz file: it says variant 5"),
    "bpe": (["in.npz", "--run", "new", "--tokenizer", "bpe"], "--tokenizer bpe is trained on text"),
    "tokenizer": (["in.npz", "--run", "a/new", "--tokenizer", "no.json"], "data.tokenizer 'no.json' is not a file"),
    "to": (["--run", "full", "--to", "x.npz", "--variant", "cc"], "--variant does not apply with --to; remove it"),
    "no run": (["--run", "none", "--to", "x.npz"], "run_dir 'none' is not a folder"),
    "there": (["--run", "full", "--to", "in.npz"], "--to 'in.npz': in.npz exists already; name a new file"),
    "folder": (["--run", "full", "--to", "no/x.npz"], "--to 'no/x.npz': "),
    "out": (["--run", "full", "--to", "x.pt"], "--to 'x.pt' is a pickle"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    golden(tmp_path / "in.npz")
    np.savez("plain.npz", **TENSORS)
    np.savez("pickled.npz", a=np.array([{}]))
    whole = (tmp_path / "in.npz").read_bytes()
    (tmp_path / "damaged.npz").write_bytes(whole[: len(whole) // 2])
    save_file(TENSORS, "whole.safetensors")
    (tmp_path / "damaged.safetensors").write_bytes((tmp_path / "whole.safetensors").read_bytes()[:-4])
    about = json.dumps({"variant": VARIANT, "config": OPTIONS})
    np.savez("short.npz", config=about, **{f"param/{n}": a for n, a in TENSORS.items() if n != "ln_f.weight"})
    (tmp_path / "list.json").write_text("[]")
    np.savez("beside.npz", **TENSORS)
    (tmp_path / "beside.json").write_text('{"hiden_size": 12}')
    np.savez("described.npz", config='{"variant": 5, "config": 3}')
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    return tmp_path


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_said_in_one_line_and_leaves_nothing_behind(folder, case, capsys):
    arguments, message = REFUSED[case]
    before = sorted(folder.rglob("*"))
    assert convert(*arguments) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith(f"error: {message}")
    assert said.out == "" and "Traceback" not in said.err
    assert sorted(folder.rglob("*")) == before


def test_what_cannot_be_written_leaves_nothing_behind(folder, capsys, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.rename", full)
    before = sorted(folder.rglob("*"))
    assert convert("in.npz", "--run", "deep/er") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("failed: ") and line.endswith("No space left on device")
    assert sorted(folder.rglob("*")) == before


def test_weights_that_cannot_be_written_leave_nothing_behind(folder, capsys, monkeypatch):
    assert convert("in.npz", "--run", "run") == 0

    def full(tensors, path, metadata):
        path.write_bytes(b"the beginning")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    before = sorted(folder.rglob("*"))
    capsys.readouterr()
    assert convert("--run", "run", "--to", "out.safetensors") == 1
    assert capsys.readouterr() == ("", "failed: I/O error: No space left on device (os error 28)\n")
    assert sorted(folder.rglob("*")) == before
