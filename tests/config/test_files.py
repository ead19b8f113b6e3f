"""Reading settings from YAML, writing configurations out, comparing them; and the configurations in configs/."""

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from ddl_jax.config import Config
from ddl_jax.config.files import (
    RESUMABLE,
    difference,
    dump_config,
    fields,
    from_settings,
    load_file,
    overlay,
    resumed,
    to_dict,
)
from ddl_jax.config.study import arm_config, load_experiment, load_study
from ddl_jax.errors import InputError

CONFIGS = Path(__file__).parents[2] / "configs"
STUDIES = sorted(path for path in (CONFIGS / "studies").glob("*.yaml") if path.stem != "laptop")
FILES = sorted(set(CONFIGS.rglob("*.yaml")) - set(STUDIES))


def load(path: Path) -> Config:
    return from_settings(load_file(path)).resolve()


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes files (text or bytes) below a fresh current directory."""
    monkeypatch.chdir(tmp_path)

    def write(**files: str | bytes) -> Path:
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            (tmp_path / f"{name}.yaml").write_bytes(data)
        return tmp_path

    return write


def message(path: str) -> str:
    with pytest.raises(InputError) as error:
        load_file(path)
    return str(error.value)


# ---- values and keys


def test_a_file_holds_settings_of_every_type(write):
    write(
        a="run_dir: 2026\nseed: '7'\n"
        "model: {layers: 0x10, qk_norm: off, head_dim: null, logit_scale: none, residual: {gate: {initial: 1}}}\n"
        "data: {corpus: files, paths: [a, 'b*']}\noptimizer: {learning_rate: 3e-4, betas: [0, 9e-1]}\n"
    )
    assert load_file("a.yaml") == {
        "run_dir": "2026",
        "seed": 7,
        "model": {
            "layers": 16,
            "qk_norm": False,
            "head_dim": None,
            "logit_scale": "none",
            "residual": {"gate": {"initial": 1.0}},
        },
        "data": {"corpus": "files", "paths": ("a", "b*")},
        "optimizer": {"learning_rate": 3e-4, "betas": (0.0, 0.9)},
    }
    assert isinstance(load_file("a.yaml")["model"]["residual"]["gate"]["initial"], float)
    write(b="data: {paths: data/*.txt}")
    assert load_file("b.yaml") == {"data": {"paths": ("data/*.txt",)}}


@pytest.mark.parametrize("content", ["", "# nothing\n", "---\n", "{}", "null", "\ufeff"])
def test_an_empty_file_is_the_defaults(write, content):
    write(a=content)
    assert load_file("a.yaml") == {}


@pytest.mark.parametrize(
    "content, expected",
    [
        ("model: {lyers: 3}", "model.lyers is not a setting; did you mean 'model.layers'?"),
        ("value_channels: 2", "value_channels is not a setting; did you mean 'model.residual.value_channels'?"),
        ("model: {steps: 2}", "model.steps is not a setting; did you mean 'training.steps'?"),
        ("model: {stepz: 2}", "model.stepz is not a setting; did you mean 'training.steps'?"),
        ("optimiser: {clip_norm: 2}", "optimiser is not a setting; did you mean 'optimizer'?"),
        (
            "zebra: 2",
            "zebra is not a setting; known here: run_dir, seed, model, data, optimizer, training",
        ),
        ("bias: 1", "bias is not a setting; did you mean 'model.residual.value.bias'?"),
        ("model.layers: 3", "model.layers is not a setting; write model: {layers: ...}"),
        ("model: 3", "model '3' must be a section with keys among layers, width, "),
        ("model:", "model null must be a section with keys among layers, width, "),
        ("model: [layers]", "model ['layers'] must be a section with keys among layers, width, "),
        ("seed: {a: 1}", "seed {'a': '1'} must be an integer"),
        ("seed: [1]", "seed ['1'] must be an integer"),
        ("seed:", "seed null must be an integer"),
        ("seed: null", "seed null must be an integer"),
        ("seed: true", "seed 'true' must be an integer"),
        ("seed: 8.0", "seed '8.0' must be an integer"),
        ("seed: 8.5", "seed '8.5' must be an integer"),
        ("seed: ''", "seed '' must be an integer"),
        ("seed: " + "9" * 5000, "seed '9999999999"),
        ("seed: '!!timestamp x'", "seed '!!timestamp x' must be an integer"),
        ("run_dir: null", "run_dir null must be printable text"),
        ("run_dir: [a]", "run_dir ['a'] must be printable text"),
        ('run_dir: "a\\0"', r"run_dir 'a\x00' must be printable text"),
        ("model: {qk_norm: 1}", "model.qk_norm '1' must be true or false"),
        ("model: {head_dim: big}", "model.head_dim 'big' must be an integer or null"),
        ("model: {logit_scale: mu}", "model.logit_scale 'mu' must be one of none, mup"),
        (
            "model: {residual: {reader: tokens}}",
            "model.residual.reader 'tokens' must be one of identity, channel, token or null",
        ),
        ("optimizer: {learning_rate: fast}", "optimizer.learning_rate 'fast' must be a finite number"),
        ("optimizer: {learning_rate: true}", "optimizer.learning_rate 'true' must be a finite number"),
        ("optimizer: {learning_rate: .nan}", "optimizer.learning_rate '.nan' must be a finite number"),
        ("optimizer: {learning_rate: nan}", "optimizer.learning_rate 'nan' must be a finite number"),
        ("optimizer: {clip_norm: .inf}", "optimizer.clip_norm '.inf' must be a finite number"),
        ("optimizer: {clip_norm: 1e400}", "optimizer.clip_norm '1e400' must be a finite number"),
        ("optimizer: {betas: 0.9}", "optimizer.betas '0.9' must be a list of 2 numbers"),
        ("optimizer: {betas: [0.9]}", "optimizer.betas ['0.9'] must be a list of 2 numbers"),
        ("optimizer: {betas: [0.9, 1, 1]}", "optimizer.betas ['0.9', '1', '1'] must be a list of 2 numbers"),
        ("optimizer: {betas: [0.9, true]}", "optimizer.betas ['0.9', 'true'] must be a list of 2 numbers"),
        ("data: {paths: [[a]]}", "data.paths [['a']] must be a list of texts"),
        ("data: {paths: {a: b}}", "data.paths {'a': 'b'} must be a list of texts"),
    ],
)
def test_a_setting_that_cannot_be(write, content, expected):
    write(a=content)
    assert message("a.yaml").startswith(f"a.yaml: {expected}")
    assert len(message("a.yaml").splitlines()) == 1


def test_unknown_keys_are_refused_in_every_section(write):
    """Bug of others: unknown keys ignored."""
    sections = {key.rpartition(".")[0] for key, _, _ in fields()}
    assert len(sections) == 10
    for section in sections:
        tree = {"zzz": 1}
        for name in filter(None, reversed(section.split("."))):
            tree = {name: tree}
        write(a=yaml.safe_dump(tree))
        assert message("a.yaml").startswith(f"a.yaml: {section + '.' if section else ''}zzz is not a setting")


# ---- files


@pytest.mark.parametrize(
    "content, expected",
    [
        ("seed: 1\nmodel: [\n", "line 3: expected the node content, but found '<stream end>'"),
        ("seed: 1\n\tmodel: 3\n", "line 2: found character '\\t' that cannot start any token"),
        ("a: b: c", "line 1: mapping values are not allowed here"),
        ("seed: 1\nmodel: {layers: 2}\nseed: 2\n", "line 3: 'seed' is given twice"),
        ("model:\n  layers: 2\n  layers: 2\n", "line 3: 'layers' is given twice"),
        ("[1]: 2", "line 1: a key must be text"),
        ("~: 2", "line 1: a key must be text"),
        ("{a: 1}: 2", "line 1: a key must be text"),
        ("model: &a {residual: *a}", "line 1: found unconstructable recursive node"),
        ("seed: 1\n---\nseed: 2\n", "line 2: but found another document"),
        ("[seed]", "must hold keys and values, not ['seed']"),
        ("seed", "must hold keys and values, not 'seed'"),
        ("[" * 2000, "is nested too deeply"),
        (b"run_dir: \xff", "is not UTF-8 text (byte 9)"),
        ("run_dir: \x01", "is not YAML: unacceptable character #x0001"),
    ],
)
def test_a_file_that_is_not_a_mapping_in_yaml(write, content, expected):
    write(a=content)
    assert message("a.yaml").startswith(f"a.yaml: {expected}")
    assert len(message("a.yaml").splitlines()) == 1


def test_a_path_that_is_not_a_readable_file(write):
    write()
    assert message("b.yaml") == "b.yaml: cannot be read: No such file or directory"
    assert message(".") == ".: cannot be read: Is a directory"
    assert message("") == ".: cannot be read: Is a directory"
    assert message("x" * 5000).endswith(": cannot be read: File name too long")
    assert message("folder/" * 30 + "b.yaml").startswith("...")  # the end of a path says which file it is
    assert message("folder/" * 30 + "b.yaml").endswith("folder/b.yaml: cannot be read: No such file or directory")
    assert message("a\0b\n") == "a\\x00b: is not the path of a file"


def test_a_file_without_permission(write, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    write(a="")
    monkeypatch.setattr(Path, "read_text", refuse)  # a mode would not stop a superuser
    assert message("a.yaml") == "a.yaml: cannot be read: Permission denied"


def test_base(write):
    folder = write(
        base="seed: 1\nmodel: {layers: 2, width: 64}",
        second="seed: 2",
        one="base: base.yaml\nmodel: {layers: 3}",
        both="base: [base.yaml, second.yaml]",
        empty="base: []\nseed: 4",
    )
    (folder / "below").mkdir()
    (folder / "below/a.yaml").write_text("base: ../one.yaml\nrun_dir: x")
    assert load_file("one.yaml") == {"seed": 1, "model": {"layers": 3, "width": 64}}
    assert load_file("both.yaml") == {"seed": 2, "model": {"layers": 2, "width": 64}}
    assert load_file("empty.yaml") == {"seed": 4}
    assert load_file("below/a.yaml") == {"seed": 1, "model": {"layers": 3, "width": 64}, "run_dir": "x"}


def test_a_base_used_twice_is_no_cycle(write):
    write(base="seed: 1", left="base: base.yaml", right="base: base.yaml", top="base: [left.yaml, right.yaml]")
    assert load_file("top.yaml") == {"seed": 1}


@pytest.mark.parametrize(
    "base, expected",
    [
        ("missing.yaml", "missing.yaml (base of a.yaml): cannot be read: No such file or directory"),
        ("[b.yaml, '']", "a.yaml: base '' must be the path of a file, or a list of paths"),
        ("", "a.yaml: base null must be the path of a file, or a list of paths"),
        ("{b: c}", "a.yaml: base {'b': 'c'} must be the path of a file, or a list of paths"),
        ("[[b.yaml]]", "a.yaml: base ['b.yaml'] must be the path of a file, or a list of paths"),
        ('"a\\0"', "a.yaml: base 'a\\x00' must be the path of a file, or a list of paths"),
        ("a.yaml", "a.yaml (base of a.yaml): the base files form a cycle"),
        ("cycle.yaml", "./a.yaml (base of cycle.yaml): the base files form a cycle"),
        ("wrong.yaml", "wrong.yaml (base of a.yaml): seed 'x' must be an integer"),
    ],
)
def test_a_base_that_cannot_be(write, base, expected):
    write(a=f"base: {base}", b="", cycle="base: [./a.yaml]", wrong="seed: x")
    assert message("a.yaml") == expected.removeprefix("./")


def test_base_is_no_setting_of_a_section(write):
    write(a="model: {base: b.yaml}")
    assert message("a.yaml").startswith("a.yaml: model.base is not a setting")


def test_overlay_merges_sections_and_replaces_values():
    under = {"a": 1, "b": {"c": (1, 2), "d": 3}}
    assert overlay(under, {"b": {"c": (4,)}, "e": 5}) == {"a": 1, "b": {"c": (4,), "d": 3}, "e": 5}
    assert under == {"a": 1, "b": {"c": (1, 2), "d": 3}}


# ---- writing and comparing


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_dump_loads_back_to_an_equal_config(path, write):
    config = load(path)
    write(dumped=dump_config(config))
    assert from_settings(load_file("dumped.yaml")) == config == load(Path("dumped.yaml"))
    assert from_settings(load_file("dumped.yaml")) == config.resolve()
    assert json.loads(json.dumps(to_dict(config))) == to_dict(config)


def test_dump_keeps_awkward_values(write):
    awkward = Config(run_dir="null", seed=2**32 - 1)
    awkward = dataclasses.replace(
        awkward,
        data=dataclasses.replace(awkward.data, corpus="files", paths=("1e3", "[ä]", "'", ": #", " ")),
        optimizer=dataclasses.replace(awkward.optimizer, learning_rate=1e-300, weight_decay=1, clip_norm=3e38),
    )
    write(a=dump_config(awkward))
    assert from_settings(load_file("a.yaml")) == awkward


def test_difference():
    old = Config()
    new = from_settings({"seed": 1, "model": {"residual": {"gate": {"hidden": 3}}}, "run_dir": "x"})
    assert difference(old, old) == []
    assert difference(old, new) == [
        ("run_dir", "runs/default", "x"),
        ("seed", 0, 1),
        ("model.residual.gate.hidden", None, 3),
    ]


def settled(changes: dict) -> Config:
    model = {"vocab_size": 320, "compute_dtype": "float32", "state_dtype": "bfloat16"}
    return from_settings(overlay({"model": model}, changes)).resolve()


def test_a_resumed_run_may_change_its_cadences_and_takes_what_was_settled():
    changes = {
        "run_dir": "./runs/default",
        "model": {"remat": "branch", "residual": {"kernel": "pallas", "backward": "saved"}},
        "data": {"workers": 2},
        "training": {
            "microbatch_size": 2,
            "log_every": 1,
            "evaluate_every": 2,
            "checkpoint_every": 4,
        },
        "mesh": {"data": 2, "fsdp": 4, "tensor": 8},
        "distributed": {"mode": "explicit", "coordinator": "here:1", "processes": 2, "process_id": 1, "timeout": 7},
    }
    assert resumed(settled({}), from_settings(changes).resolve()) == settled(changes)
    changed = {key for key, _, _ in difference(settled({}), settled(changes))}
    assert changed == set(RESUMABLE), "every resumable key is tested"


@pytest.mark.parametrize("key", [key for key, _, _ in fields() if key not in RESUMABLE])
def test_a_resumed_run_refuses_any_other_change(key):
    """Each setting in turn, by a recorded value that is unlike the requested one."""
    requested = settled({})
    other = "other"
    for name in reversed(key.split(".")):
        other = {name: other}
    recorded = from_settings(overlay(dataclasses.asdict(requested), other))
    with pytest.raises(InputError, match=f"^runs/default holds a run with another configuration: {key} \\(was 'other'"):
        resumed(recorded, requested)


def test_a_refused_resume_names_the_first_keys():
    other = settled({"seed": 1, "model": {"width": 64, "heads": 4}, "optimizer": {"clip_norm": 2.0}})
    with pytest.raises(InputError) as error:
        resumed(settled({}), other)
    assert str(error.value) == (
        "runs/default holds a run with another configuration: seed (was 0, now 1), model.width (was 256, now 64), "
        "model.heads (was 2, now 4) and 2 more; use another run_dir or the recorded values"
    )


def test_settled_values_accept_only_the_request_for_whatever_it_was():
    recorded = settled({})
    for name, other in (("vocab_size", 384), ("compute_dtype", "bfloat16"), ("state_dtype", "float32")):
        with pytest.raises(InputError, match=f"model.{name} "):
            resumed(recorded, settled({"model": {name: other}}))
    with pytest.raises(InputError, match="model.vocab_size .was null, now 320."):
        resumed(Config().resolve(), settled({"model": {"compute_dtype": "auto", "state_dtype": "auto"}}))


# ---- the configurations in configs/

VARIANTS = {  # contract 4; kind, V, reader, expansion
    "baseline": ("additive", 1, "identity", "repeat"),
    "scalar": ("delta", 1, "identity", "repeat"),
    "tc_no_ec": ("delta", 4, "token", "repeat"),
    "cc_no_ec": ("delta", 4, "channel", "repeat"),
    "tc": ("delta", 4, "token", "convolution"),
    "cc": ("delta", 4, "channel", "convolution"),
    "additive_expanded": ("additive_expanded", 4, "channel", "convolution"),
    "write_only": ("write_only", 4, "channel", "convolution"),
}


def kind_of(config: Config) -> tuple:
    residual = config.model.residual
    return residual.kind, residual.value_channels, residual.reader, residual.expansion


@pytest.mark.parametrize("size, shape", [("small", (12, 768, 6)), ("medium", (24, 1024, 8))])
def test_the_papers_configurations(size, shape):
    assert {path.stem for path in (CONFIGS / size).glob("*.yaml")} == set(VARIANTS)
    for name, kind in VARIANTS.items():
        config = load(CONFIGS / size / f"{name}.yaml")
        model, optimizer, training = config.model, config.optimizer, config.training
        assert kind_of(config) == kind
        assert config.run_dir == f"runs/{size}/{name}"
        assert (model.layers, model.width, model.heads, model.head_dim) == (*shape, 128)
        assert (model.context_length, model.vocab_size, model.logit_scale) == (1024, 50304, "mup")
        assert (model.residual.preset, config.data.tokenizer) == ("paper", "gpt2")
        assert (training.steps, training.batch_size) == (100_000, 480)
        assert (optimizer.learning_rate, optimizer.warmup_steps, optimizer.betas) == (1e-3, 2000, (0.9, 0.95))
        assert (optimizer.weight_decay, optimizer.clip_norm) == (0.1, 1.0)


@pytest.mark.parametrize("size", ["small", "medium"])
def test_variants_differ_in_the_residual_stream_alone(size):
    """Bug of others: defaults that differ between two files."""
    reference = load(CONFIGS / size / "baseline.yaml")
    for name in VARIANTS:
        keys = {key for key, _, _ in difference(reference, load(CONFIGS / size / f"{name}.yaml"))}
        assert all(key == "run_dir" or key.startswith("model.residual.") for key in keys)


def test_quickstart_and_bench():
    quickstart = load(CONFIGS / "quickstart.yaml")
    assert kind_of(quickstart) == VARIANTS["cc"]
    assert (quickstart.data.corpus, quickstart.data.tokenizer) == ("pydoc", "bytes")
    assert (quickstart.run_dir, quickstart.model.logit_scale) == ("runs/quickstart", "none")
    for name in ("baseline", "cc"):
        config = load(CONFIGS / "bench" / f"{name}.yaml")
        assert kind_of(config) == VARIANTS[name]
        model, training = config.model, config.training
        assert (model.layers, model.width, model.heads, model.head_dim, model.vocab_size) == (4, 256, 2, 128, 8192)
        assert (training.batch_size, model.context_length, training.unroll) == (8, 256, 4)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_studies(path):
    study = load_study(path)
    for file in study.experiments.values():
        experiment = load_experiment([file], {})
        for arm in study.arms:
            assert arm_config(study, experiment, arm) == arm_config(study, experiment, arm).resolve()
