"""Every rule about a setting, by what it says; what follows from what; the two presets."""

import dataclasses
import math
from typing import Any

import pytest

from ddl_jax.config import PRESETS, Config, GateConfig, OptimizerConfig, ResidualConfig, TransformerConfig, ValueConfig
from ddl_jax.config.files import fields, from_settings, overlay
from ddl_jax.config.rules import LARGEST_FLOAT, expected, fits, shown
from ddl_jax.errors import InputError, nearest_divisors, nearest_multiples


def settings(changes: dict[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} as {"a": {"b": 1}}."""
    tree: dict[str, Any] = {}
    for key, value in changes.items():
        for name in reversed(key.split(".")):
            value = {name: value}
        tree = overlay(tree, value)
    return tree


def config(**changes: Any) -> Config:
    """A Config with dotted settings, "__" standing for the dot; not resolved."""
    return from_settings(settings({key.replace("__", "."): value for key, value in changes.items()}))


R = "model.residual."
BROKEN_RULES = [
    ({"run_dir": " "}, "run_dir ' ' must name a folder; e.g. 'runs/first'"),
    ({"run_dir": "a\nb"}, r"run_dir 'a\nb' must be printable text"),
    ({"seed": -1}, "seed -1 must lie in [0, 2**32); nearest: 0"),
    ({"seed": 2**32}, "seed 4294967296 must lie in [0, 2**32); nearest: 4294967295"),
    ({"seed": True}, "seed true must be an integer"),
    ({"model.layers": 0}, "model.layers 0 must be at least 1; nearest: 1"),
    ({"model.layers": 2**31}, "model.layers 2147483648 is too large; nearest: 2147483647"),
    ({"model.layers": 10**5000}, None),
    ({"model.layers": 8.0}, "model.layers 8.0 must be an integer"),
    ({"model.width": 0}, "model.width 0 must be at least 1; nearest: 1"),
    ({"model.width": 770, "model.heads": 6}, "model.width 770 is not divisible by model.heads 6; nearest: 768, 774"),
    ({"model.width": 4, "model.heads": 6}, "model.width 4 is not divisible by model.heads 6; nearest: 6"),
    ({"model.heads": -2}, "model.heads -2 must be at least 1; nearest: 1"),
    ({"model.head_dim": 0}, "model.head_dim 0 must be at least 1; nearest: 1"),
    ({"model.head_dim": 33}, "model.head_dim 33 must be even for RoPE; nearest: 32, 34"),
    (
        {"model.width": 6, "model.heads": 2},
        "model.head_dim 3 must be even for RoPE (it is width 6 / heads 2); nearest: 2, 4",
    ),
    ({"model.context_length": 0}, "model.context_length 0 must be at least 1; nearest: 1"),
    ({"model.vocab_size": 0}, "model.vocab_size 0 must be at least 1; nearest: 1"),
    ({"model.qk_norm": 1}, "model.qk_norm 1 must be true or false"),
    ({"model.logit_scale": "sp"}, "model.logit_scale 'sp' must be one of none, mup"),
    (
        {"model.logit_base_width": 1024},
        "model.logit_base_width 1024 does not apply: logit_scale is 'none'; remove it",
    ),
    (
        {"model.logit_scale": "mup", "model.logit_base_width": 0},
        "model.logit_base_width 0 must be at least 1; nearest: 1",
    ),
    ({"model.compute_dtype": "fp8"}, "model.compute_dtype 'fp8' must be one of auto, float32, bfloat16, float64"),
    (
        {R + "kind": "plain"},
        f"{R}kind 'plain' must be one of additive, additive_expanded, write_only, delta, hyper_connections, mhc",
    ),
    (
        {R + "kind": ["delta"]},
        f"{R}kind ['delta'] must be one of additive, additive_expanded, write_only, delta, hyper_connections, mhc",
    ),
    (
        {R + "kind": "hyper_connections", R + "reader": "channel"},
        f"{R}reader 'channel' does not apply: kind 'hyper_connections' reads its streams by matrices of its own; "
        "remove it",
    ),
    (
        {R + "kind": "hyper_connections", R + "shared_reader": False},
        f"{R}shared_reader false does not apply: kind 'hyper_connections' reads its streams by matrices of its own; "
        "remove it",
    ),
    (
        {R + "kind": "mhc", R + "backward": "reversible"},
        f"{R}backward 'reversible' does not apply: kind 'mhc' has no gate, value or direction; remove it",
    ),
    (
        {R + "kind": "mhc", R + "gate.hidden": 4},
        f"{R}gate.hidden 4 does not apply: kind 'mhc' has no gate, value or direction; remove it",
    ),
    (
        {R + "kind": "mhc", R + "expansion": "convolution"},
        f"{R}expansion 'convolution' must be 'repeat' with kind 'mhc', whose streams start as copies of the embedding",
    ),
    (
        {R + "kind": "mhc", R + "value_channels": 1},
        f"{R}value_channels 1 must be at least 2 with kind 'mhc': a stream alone has nothing to mix with; nearest: 2",
    ),
    (
        {R + "kind": "mhc", R + "kernel": "pallas"},
        f"{R}kernel 'pallas' does not apply: kind 'mhc' has no kernels; use 'auto'",
    ),
    (
        {R + "kind": "mhc", R + "dynamic": True},
        f"{R}dynamic true does not apply: kind is 'mhc', not 'hyper_connections'; remove it",
    ),
    ({R + "dynamic": False}, f"{R}dynamic false does not apply: kind is 'delta', not 'hyper_connections'; remove it"),
    ({R + "preset": None}, f"{R}preset null must be one of paper, official_code"),
    (
        {R + "kind": "additive", R + "value_channels": 4},
        f"{R}value_channels 4 must be 1 with kind 'additive'; nearest: 1, or kind: additive_expanded",
    ),
    (
        {R + "kind": "additive", R + "reader": "channel"},
        f"{R}reader 'channel' must be 'identity' with kind 'additive'; or use kind: additive_expanded",
    ),
    (
        {R + "kind": "additive", R + "expansion": "convolution"},
        f"{R}expansion 'convolution' must be 'repeat' with kind 'additive'; or use kind: additive_expanded",
    ),
    ({R + "value_channels": 0}, f"{R}value_channels 0 must lie in [1, 8]; nearest: 1"),
    ({R + "value_channels": 9}, f"{R}value_channels 9 must lie in [1, 8]; nearest: 8"),
    (
        {R + "reader": "identity"},
        f"{R}reader 'identity' needs value_channels 1, not 4; use 'channel' or 'token'",
    ),
    (
        {R + "value_channels": 1, R + "shared_reader": True},
        f"{R}shared_reader true does not apply: reader is 'identity'; remove it",
    ),
    (
        {R + "value_channels": 1, R + "reader_initial": "mean"},
        f"{R}reader_initial 'mean' does not apply: reader is 'identity'; remove it",
    ),
    ({R + "reader_taps": 4}, f"{R}reader_taps 4 does not apply: reader is 'channel'; remove it"),
    ({R + "reader": "token", R + "reader_taps": 0}, f"{R}reader_taps 0 must be at least 1; nearest: 1"),
    (
        {R + "reader": "token", R + "reader_form": "direct"},
        f"{R}reader_form 'direct' does not apply: reader is 'token'; remove it",
    ),
    ({R + "expansion_taps": 0}, f"{R}expansion_taps 0 must be at least 1; nearest: 1"),
    (
        {R + "expansion": "repeat", R + "expansion_taps": 4},
        f"{R}expansion_taps 4 does not apply: expansion is 'repeat'; remove it",
    ),
    (
        {R + "kind": "additive_expanded", R + "epsilon": 1e-5},
        f"{R}epsilon 1e-05 does not apply: kind 'additive_expanded' has no gate, value or direction; remove it",
    ),
    (
        {R + "kind": "additive", R + "direction": "mlp"},
        f"{R}direction 'mlp' does not apply: kind 'additive' has no gate, value or direction; remove it",
    ),
    (
        {R + "kind": "additive", R + "gate.initial": 1.0},
        f"{R}gate.initial 1.0 does not apply: kind 'additive' has no gate, value or direction; remove it",
    ),
    (
        {R + "kind": "additive", R + "value.constant": 0.0},
        f"{R}value.constant 0.0 does not apply: kind 'additive' has no gate, value or direction; remove it",
    ),
    ({R + "epsilon": 0.0}, f"{R}epsilon 0.0 must lie in [1e-18, 1.0] (the paper uses 1e-5); nearest: 1e-18"),
    ({R + "epsilon": 2}, f"{R}epsilon 2 must lie in [1e-18, 1.0] (the paper uses 1e-5); nearest: 1.0"),
    ({R + "direction_width": 8}, f"{R}direction_width 8 does not apply: direction is 'sublayer'; remove it"),
    (
        {R + "direction": "mlp", R + "direction_width": 0},
        f"{R}direction_width 0 must be at least 1; nearest: 1",
    ),
    ({R + "kernel": "cuda"}, f"{R}kernel 'cuda' must be one of auto, xla, pallas"),
    (
        {R + "kernel": "pallas", "model.width": 72},
        f"{R}kernel 'pallas' cannot run: width 72 is not a multiple of 128; nearest: 128; or use 'auto'",
    ),
    (
        {R + "kernel": "pallas", "model.width": 640, R + "value_channels": 9},
        f"{R}value_channels 9 must lie in [1, 8]; nearest: 8",
    ),
    (
        {R + "kernel": "pallas", "model.width": 4096, R + "value_channels": 8},
        f"{R}kernel 'pallas' cannot run: width 4096 with 8 channels needs more registers than there are; nearest: 2048"
        "; or use 'auto'",
    ),
    (
        {R + "kernel": "pallas", R + "reader": "token", R + "reader_taps": 9},
        f"{R}kernel 'pallas' cannot run: 9 taps are outside 1 to 8; nearest: 8; or use 'auto'",
    ),
    (
        {R + "kernel": "pallas", R + "kind": "additive"},
        f"{R}kernel 'pallas' does not apply: kind 'additive' with reader 'identity' has no kernels; use 'auto'",
    ),
    (
        {R + "kernel": "pallas", R + "kind": "additive_expanded"},
        f"{R}kernel 'pallas' does not apply: kind 'additive_expanded' with reader 'channel' has no kernels; use 'auto'",
    ),
    ({R + "gate.hidden": -1}, f"{R}gate.hidden -1 must be at least 0; nearest: 0"),
    ({R + "gate.hidden_bias": True}, f"{R}gate.hidden_bias true does not apply: gate.hidden is 0; remove it"),
    (
        {R + "gate.initial": 0.0},
        f"{R}gate.initial 0.0 must lie in [0.01, 1.99]: outside, the sigmoid is saturated and the gate stays dead"
        "; nearest: 0.01",
    ),
    ({R + "gate.initial": math.nan}, f"{R}gate.initial nan must be a finite number or null"),
    ({R + "value.scale": 0}, f"{R}value.scale 0 must not be 0; the paper uses 1.0"),
    ({R + "value.constant": math.inf}, f"{R}value.constant inf must be a finite number or null"),
    (
        {R + "value.constant": 1.0, R + "value.bias": False},
        f"{R}value.bias false does not apply: value.constant is set; remove it",
    ),
    (
        {R + "value.constant": 1.0, R + "direction": "mlp"},
        f"{R}value.constant 1.0 leaves the sublayer's output unused with direction 'mlp'; remove it",
    ),
    (
        {R + "value.source": "read", R + "direction": "attention"},
        f"{R}value.source 'read' leaves the sublayer's output unused with direction 'attention'; use 'branch'",
    ),
    ({"data.corpus": "files"}, "data.paths [] must name files for corpus 'files'; e.g. ['data/*.txt']"),
    ({"data.corpus": "shards"}, "data.paths [] must name files for corpus 'shards'; e.g. ['data/*.bin']"),
    (
        {"data.corpus": "shards", "data.paths": ("*.bin",), "data.tokenizer": "bpe"},
        "data.tokenizer 'bpe' is trained on text, which corpus 'shards' does not have; name the one that made the "
        "shards, e.g. 'gpt2' or the path of a tokenizer.json",
    ),
    (
        {"data.corpus": "files", "data.paths": ("a", "")},
        "data.paths ['a', ''] must name files for corpus 'files'; e.g. ['data/*.txt']",
    ),
    (
        {"data.paths": ("a",)},
        "data.paths ['a'] only applies to corpus 'files' or 'shards', not 'pydoc'; set data.corpus: files, or shards",
    ),
    ({"data.paths": "a"}, "data.paths 'a' must be a list of texts"),
    (
        {"data.tokenizer": "gpt3"},
        "data.tokenizer 'gpt3' is not a tokenizer; use 'bytes', 'gpt2', 'bpe' or the path of a tokenizer.json",
    ),
    ({"data.vocabulary": 300}, "data.vocabulary 300 does not apply: tokenizer is 'bytes', not 'bpe'; remove it"),
    (
        {"data.tokenizer": "bpe", "data.vocabulary": 256},
        "data.vocabulary 256 must be at least 257; nearest: 257",
    ),
    ({"data.validation_fraction": 1.0}, "data.validation_fraction 1.0 must lie between 0 and 1; typical: 0.1"),
    ({"data.workers": -1}, "data.workers -1 must be at least 0; nearest: 0"),
    ({"optimizer.learning_rate": 0.0}, "optimizer.learning_rate 0.0 must be positive; typical: 1e-3"),
    ({"optimizer.learning_rate": math.nan}, "optimizer.learning_rate nan must be a finite number"),
    (
        {"optimizer.warmup_steps": 1000},
        "optimizer.warmup_steps 1000 must lie in [0, training.steps), which is 1000; nearest: 999",
    ),
    (
        {"optimizer.warmup_steps": -1},
        "optimizer.warmup_steps -1 must lie in [0, training.steps), which is 1000; nearest: 0",
    ),
    ({"optimizer.final_fraction": 1.5}, "optimizer.final_fraction 1.5 must lie in [0.0, 1.0]; nearest: 1.0"),
    ({"optimizer.weight_decay": -0.1}, "optimizer.weight_decay -0.1 must not be negative; nearest: 0"),
    (
        {"optimizer.betas": (0.9, 1.0)},
        "optimizer.betas [0.9, 1.0] must both lie in [0, 1); the paper uses [0.9, 0.95]",
    ),
    ({"optimizer.betas": (0.9,)}, "optimizer.betas [0.9] must be a list of 2 numbers"),
    ({"optimizer.clip_norm": 0}, "optimizer.clip_norm 0 must be positive; the paper uses 1.0"),
    *(
        ({f"training.{name}": 0}, f"training.{name} 0 must be at least 1; nearest: 1")
        for name in ("batch_size", "microbatch_size", "log_every", "evaluate_every", "evaluation_batches")
    ),
    ({"training.steps": 0}, "training.steps 0 must be at least 1; nearest: 1"),
    ({"training.checkpoint_every": 0}, "training.checkpoint_every 0 must be at least 1; nearest: 1"),
    ({"training.unroll": 0}, "training.unroll 0 must be at least 1; nearest: 1"),
    (
        {"training.microbatch_size": 3},
        "training.microbatch_size 3 does not divide training.batch_size 8; nearest: 2, 4",
    ),
    ({"training.unroll": 5}, "training.unroll 5 must not exceed model.layers 4; nearest: 4"),
]


@pytest.mark.parametrize("changes, message", BROKEN_RULES, ids=lambda value: ",".join(value) if value else None)
def test_broken_rule(changes, message):
    with pytest.raises(InputError) as error:
        from_settings(settings(changes)).resolve()
    assert len(str(error.value).splitlines()) == 1 and len(str(error.value)) < 250
    if message is not None:
        assert str(error.value) == message


def test_every_field_of_every_section_has_its_type_checked():
    for key, _, _ in fields():
        with pytest.raises(InputError, match=f"^{key} .* must be "):
            from_settings(settings({key: object()})).resolve()


def test_defaults_resolve_to_the_paper():
    model = Config().resolve().model
    assert (model.head_dim, model.vocab_size) == (128, None)
    assert model.residual == ResidualConfig(
        kind="delta",
        kernel="auto",
        value_channels=4,
        reader="channel",
        reader_form="direct",
        reader_initial="mean",
        expansion="convolution",
        expansion_taps=4,
        direction="sublayer",
        shared_reader=False,
        epsilon=1e-5,
        backward="reversible",
        gate=GateConfig(hidden=0, initial=1.0),
        value=ValueConfig("context", "none", 1.0, False),
    )


@pytest.mark.parametrize(
    "changes, filled",
    [
        ({"kind": "additive"}, {"value_channels": 1, "reader": "identity", "expansion": "repeat", "epsilon": None}),
        ({"kind": "additive_expanded"}, {"value_channels": 4, "reader": "channel", "direction": None}),
        (
            {"kind": "hyper_connections"},
            {"value_channels": 4, "reader": None, "expansion": "repeat", "dynamic": True, "backward": None},
        ),
        ({"kind": "mhc"}, {"value_channels": 4, "reader": None, "expansion": "repeat", "dynamic": None}),
        ({"value_channels": 1}, {"reader": "identity", "expansion": "repeat", "reader_initial": None}),
        ({"value_channels": 1, "reader": "token"}, {"reader_taps": 4, "shared_reader": False}),
        ({"reader": "token"}, {"reader_taps": 4, "reader_form": None, "reader_initial": "mean"}),
        ({"direction": "mlp"}, {"direction_width": 64, "value": ValueConfig("branch", "none", 1.0, False)}),
        ({"direction": "attention", "direction_width": 5}, {"direction_width": 5}),
        ({"gate": GateConfig(hidden=8)}, {"gate": GateConfig(8, True, 1.0)}),
        ({"value": ValueConfig(constant=2.0)}, {"value": ValueConfig(constant=2.0)}),
    ],
    ids=str,
)
def test_what_follows_from_what(changes, filled):
    resolved = ResidualConfig(**changes).resolve(256)
    assert {name: getattr(resolved, name) for name in filled} == filled
    assert resolved.resolve(256) == resolved


@pytest.mark.parametrize("changes", [
    {"kind": "additive", "kernel": "xla"},
    {"kind": "additive_expanded", "kernel": "xla"},
    {"kind": "additive_expanded", "reader": "token", "kernel": "pallas"},
    {"value_channels": 1, "kernel": "pallas"},
    {"value_channels": 8, "kernel": "pallas"},
], ids=str)  # fmt: skip
def test_kernels_that_may_be_asked_for(changes):
    assert ResidualConfig(**changes).resolve(256).kernel == changes["kernel"]


@pytest.mark.parametrize("kernel", ["auto", "xla"])
def test_what_pallas_cannot_take_others_can(kernel):
    assert ResidualConfig(kernel=kernel).resolve(72).kernel == kernel


def test_other_fields_that_follow():
    resolved = config(data__tokenizer="bpe", training__batch_size=6, model__width=64, model__heads=4).resolve()
    assert resolved.data.vocabulary == 4096
    assert resolved.on(1).training.microbatch_size == 6 and resolved.on(3).training.microbatch_size == 2
    assert resolved.model.head_dim == 16
    assert config(model__width=64, model__heads=3, model__head_dim=8).resolve().model.head_dim == 8
    assert resolved.resolve() == resolved


# design 2.1: what distinguishes the two presets, as fields of a DDL-CC stream with a two-layer gate.
DIFFERENCES = {
    "shared_reader": (False, True),
    "reader_form": ("direct", "convolution"),
    "reader_initial": ("mean", "normal"),
    "gate.hidden_bias": (True, False),
    "value.source": ("context", "read"),
    "value.activation": ("none", "sigmoid"),
    "value.scale": (1.0, 4.0),
    "value.bias": (False, True),
}


def stream(**changes: Any) -> dict[str, Any]:
    resolved = config(**{"model__residual__gate__hidden": 8, **changes}).resolve().model.residual
    values = {"": resolved, "gate": resolved.gate, "value": resolved.value}
    return {key: getattr(values[key.rpartition(".")[0]], key.rpartition(".")[2]) for key in DIFFERENCES}


def test_presets_differ_in_the_fields_of_the_design_and_in_nothing_else():
    assert stream() == {key: paper for key, (paper, _) in DIFFERENCES.items()}
    assert stream(model__residual__preset="official_code") == {key: code for key, (_, code) in DIFFERENCES.items()}
    assert sum(len(section) for section in PRESETS["paper"].values()) == len(DIFFERENCES)
    both = [ResidualConfig(preset=name, gate=GateConfig(hidden=8)).resolve(64) for name in ("paper", "official_code")]
    changed = {
        field.name for field in dataclasses.fields(ResidualConfig) if len({getattr(c, field.name) for c in both}) > 1
    }
    assert changed == {"preset", "shared_reader", "reader_form", "reader_initial", "gate", "value"}


@pytest.mark.parametrize("preset", [0, 1], ids=["paper", "official_code"])
@pytest.mark.parametrize("key", DIFFERENCES)
def test_every_difference_of_the_presets_can_be_set_alone(key, preset):
    name = ("paper", "official_code")[preset]
    other = DIFFERENCES[key][1 - preset]
    changes = {"model__residual__preset": name, f"model__residual__{key.replace('.', '__')}": other}
    assert stream(**changes) == {**{k: both[preset] for k, both in DIFFERENCES.items()}, key: other}


def test_a_section_can_be_resolved_alone():
    with pytest.raises(InputError, match="^model.heads true must be an integer$"):
        TransformerConfig(heads=True).resolve()
    with pytest.raises(InputError, match="^residual.gate.hidden 2.5 must be an integer or null$"):
        ResidualConfig(gate=GateConfig(hidden=2.5)).resolve(64, "residual")
    with pytest.raises(InputError, match="^model.residual null must be a section"):
        TransformerConfig(residual=None).resolve()
    OptimizerConfig().validate(steps=101)


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 1


@pytest.mark.parametrize(
    "value, hint, right",
    [
        (3, int, True),
        (True, int, False),
        (3.0, int, False),
        (3, float, True),
        (False, float, False),
        (LARGEST_FLOAT, float, True),
        (1e39, float, False),
        (10**400, float, False),
        (None, float | None, True),
        (None, float, False),
        ("\udcff", str, False),
        ((), tuple[str, ...], True),
        (["a"], tuple[str, ...], False),
        ((1, 2.0), tuple[float, float], True),
        ((1, True), tuple[float, float], False),
    ],
    ids=str,
)
def test_fits(value, hint, right):
    assert fits(value, hint) is right


def test_words_for_messages():
    assert expected(int | None) == "an integer or null"
    assert expected(tuple[str, ...]) == "a list of texts"
    assert shown("a\nb\x1b[0m") == r"'a\nb\x1b[0m'"
    assert shown(10**5000).startswith("0x") and len(shown("x" * 500)) == 80
    assert nearest_multiples(770, 6) == "768, 774" and nearest_multiples(3, 6) == "6"
    assert nearest_divisors(5, 480) == "4, 5" and nearest_divisors(7, 13) == "1, 13"
    assert nearest_divisors(1000, 2**31 - 1) == "1, 2147483647"


def test_a_huge_batch_is_judged_at_once():
    with pytest.raises(InputError, match="does not divide"):
        config(training__batch_size=2**31 - 1, training__microbatch_size=2).resolve()
