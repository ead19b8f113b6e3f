"""`model.residual.kernel`: the same training step by either implementation, and what it compiles to for H200s."""

import dataclasses
import re
import types

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import optax
import pytest

from ddl_jax.config import Config, OptimizerConfig, ResidualConfig, TrainingConfig, TransformerConfig
from ddl_jax.errors import InputError
from ddl_jax.residual import DeltaStream
from ddl_jax.residual.kernels import decided, explain
from ddl_jax.training.step import Batch, TrainState, init_state, make_train_step, model_graph
from pallas_kernels import hopper
from tests.h200 import needs_compiler
from tests.quick import QUICK
from tests.training.runs import python

STREAMS = {
    "CC": ResidualConfig(),
    "TC": ResidualConfig(value_channels=2, reader="token"),
    "scalar": ResidualConfig(value_channels=1),
    "write-only": ResidualConfig(kind="write_only", value_channels=2),
}


def device(platform, kind, capability=None):
    return types.SimpleNamespace(platform=platform, device_kind=kind, compute_capability=capability)


CPU, H200, A100 = device("cpu", "cpu"), device("gpu", "NVIDIA H200", "9.0"), device("gpu", "NVIDIA A100", "8.0")


def configuration(residual, kernel="auto", *, batch=1, tokens=4, width=128, dtype="float32", layers=2, remat="none"):
    model = TransformerConfig(
        layers=layers, width=width, heads=2, vocab_size=13, context_length=tokens, attention="xla", compute_dtype=dtype,
        state_dtype=dtype, remat=remat, residual=dataclasses.replace(residual, kernel=kernel),
    )  # fmt: skip
    return Config(
        model=model,
        optimizer=OptimizerConfig(warmup_steps=4, clip_norm=1e9),
        training=TrainingConfig(steps=100, batch_size=batch),
    ).resolve()


def abstract(config):
    """The state and a batch, as types."""
    shape = (config.training.batch_size, config.model.context_length)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    return jax.eval_shape(lambda: init_state(config)), Batch(tokens, tokens)


def step(config, devices=None):
    return jax.jit(make_train_step(model_graph(config, devices), config), donate_argnums=0)


# ---- the numbers


@pytest.fixture
def on_a_cpu():
    if jax.default_backend() != "cpu":
        pytest.skip("is about machines without a GPU")


def varied(state: TrainState) -> TrainState:
    """Other parameters than at the start, where some gradients are 0, some channels all alike and branches tiny."""
    leaves, tree = jax.tree.flatten(state.parameters)
    rng = np.random.default_rng(0)
    leaves = [p + jnp.asarray(0.1 * rng.standard_normal(p.shape), p.dtype) for p in leaves]
    return state._replace(parameters=tree.unflatten(leaves))


def stepped(config) -> tuple[dict[str, np.ndarray], bool]:
    """The loss and ten times less than every gradient (AdamW's first moment) of one training step; whether an
    interpreter ran."""
    rng = np.random.default_rng(0)
    shape = (2, config.training.batch_size, config.model.context_length)
    batch = Batch(*jnp.asarray(rng.integers(0, config.model.vocab_size, shape), jnp.int32))
    state = varied(init_state(config))
    lowered = step(config).lower(state, batch)
    state, metrics = lowered.compile(QUICK)(state, batch)
    moments = optax.tree.get(state.optimizer, "mu")
    found = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(moments)}
    return {"loss": np.asarray(metrics["loss"]), **found}, "callback" in lowered.as_text()


# Write-only differs in the operation alone. Where states are walked back, remat has no kernels in it, so the
# interpreter takes it.
@pytest.mark.parametrize("name, backward", [("CC", "saved"), ("TC", "saved"), ("scalar", "saved"), ("CC", "reversible"),
                                            ("TC", "reversible")])  # fmt: skip
def test_the_step_of_the_kernels_is_that_of_xla(on_a_cpu, name, backward):
    residual = dataclasses.replace(STREAMS[name], backward=backward)
    remat = "branch" if backward == "reversible" else "none"
    (by_xla, _), (by_pallas, interpreted) = (
        stepped(configuration(residual, k, remat=remat)) for k in ("xla", "pallas")
    )
    assert interpreted
    assert by_xla.keys() == by_pallas.keys()
    for key, expected in by_xla.items():
        scale = np.max(np.abs(expected))
        assert scale > 0, key
        # float32 on both sides, with sums in another order: seen up to 2e-6 after the two layers and back.
        np.testing.assert_allclose(by_pallas[key], expected, rtol=0, atol=1e-5 * scale, err_msg=key)


def instructions(program) -> list[str]:
    """The instructions of a compiled program, without the names and places in the source by which they are called."""
    lines = re.sub(r", metadata=\{[^}]*\}", "", program.as_text()).splitlines()
    return sorted(re.sub(r"%[\w.-]+", "%", line) for line in lines if " = " in line)


def test_auto_on_a_cpu_is_the_program_of_xla(on_a_cpu):
    """Whether it is decided before tracing or, for devices not known then, when lowering."""
    programs = [
        instructions(step(config, devices).lower(*abstract(config)).compile(QUICK))
        for config in (configuration(STREAMS["CC"], kernel) for kernel in ("xla", "auto"))
        for devices in (jax.devices(), None)
    ]
    assert len(programs[0]) > 100
    assert all(program == programs[0] for program in programs)


# ---- the program for an H200

BF16 = {"batch": 2, "tokens": 64, "width": 256, "dtype": "bfloat16"}
# Half of the time to compile, which these tests mostly are.
FAST = QUICK | {"xla_gpu_autotune_level": 0}


def kernels_of_the_step(config) -> dict[str, int]:
    step = jax.jit(make_train_step(model_graph(config), config), donate_argnums=0, compiler_options=FAST)
    return hopper.kernels(hopper.compile_for(step, *abstract(config)))


@needs_compiler
@pytest.mark.parametrize("remat, backward, expected", [
    # Once for each of the two sublayers in the body of the loop over layers.
    ("none", "saved", {"rewrite_and_read": 2, "rewrite_and_read_backward": 2}),
    # Backward makes again what the attention sublayer's write gave, but not what the last one gave.
    ("layer", "saved", {"rewrite_and_read": 3, "rewrite_and_read_backward": 2}),
    ("branch", "reversible", {"rewrite_and_read": 2, "rewrite_and_read_reverse": 2}),
])  # fmt: skip
def test_the_kernels_of_a_step_for_an_h200(remat, backward, expected):
    residual = dataclasses.replace(STREAMS["CC"], backward=backward)
    assert kernels_of_the_step(configuration(residual, remat=remat, **BF16)) == expected


def gradient_of_a_stream(residual):
    """A stream's gradient in its parameters and the embedding, and types for its arguments; three sublayers."""
    stream = DeltaStream(residual, width=256, sublayers=3, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    graph, parameters = nnx.split(stream)

    def loss(parameters, embedding):
        stream = nnx.merge(graph, parameters)

        def sublayer(carry, connection):
            state, x = carry
            return connection.write_then_read(state, jnp.sin(x), x, x), None

        state = stream.expand(embedding)
        (_, x), _ = jax.lax.scan(sublayer, (state, stream.read(state, 0)), stream.connections())
        return jnp.sum(x.astype(jnp.float32) ** 2)

    embedding = jax.ShapeDtypeStruct((2, 64, 256), jnp.bfloat16)
    return jax.grad(loss, argnums=(0, 1)), jax.eval_shape(lambda: parameters), embedding


@needs_compiler
@pytest.mark.parametrize("name, forward", [
    ("TC", {"rewrite": 1, "token_read": 2}),  # the first read stands before the loop
    ("scalar", {"rewrite": 1}),
    ("write-only", {"rewrite_and_read": 1}),
])  # fmt: skip
def test_the_kernels_of_other_streams(name, forward):
    expected = forward | {f"{kernel}_backward": count for kernel, count in forward.items()}
    assert hopper.kernels(hopper.compile_for(*gradient_of_a_stream(STREAMS[name]))) == expected


@needs_compiler
@pytest.mark.parametrize("changes, devices, expected", [
    ({}, None, True),
    ({}, [H200], True),
    ({"kernel": "pallas"}, None, True),
    ({"kernel": "xla"}, None, False),
    ({"width": 192}, None, False),
    ({"residual": ResidualConfig(kind="additive_expanded")}, None, False),
], ids=str)  # fmt: skip
def test_when_a_step_for_an_h200_has_kernels(changes, devices, expected):
    config = configuration(**{"residual": STREAMS["CC"], "layers": 1} | BF16 | changes)
    # `pallas` is for the devices that the arguments are on; elsewhere than on a GPU it is interpreted.
    alone = NamedSharding(hopper.mesh({"device": 1}), PartitionSpec())
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=alone), abstract(config)
    )
    lowered = step(config, devices).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert ("mosaic_gpu" in lowered.as_text()) == expected


# ---- what is said about it


NINE_TAPS = {"reader": "token", "reader_taps": 9}


@pytest.mark.parametrize("changes, width, where, expected", [
    ({}, 128, CPU, "XLA: no Hopper GPU here"),
    ({}, 128, H200, "Pallas (Hopper)"),
    ({}, 128, A100, "XLA: NVIDIA A100 is not a Hopper GPU"),
    ({}, 72, H200, "XLA: width 72 is not a multiple of 128; nearest: 128"),
    ({"kernel": "xla"}, 128, H200, "XLA"),
    ({"kernel": "pallas"}, 128, H200, "Pallas (Hopper)"),
    ({"kernel": "pallas"}, 128, CPU, "Pallas (interpreted)"),
    ({"reader": "token"}, 128, H200, "Pallas (Hopper)"),
    (NINE_TAPS, 128, H200, "rewrite by Pallas (Hopper), token_read by XLA: 9 taps are outside 1 to 8; nearest: 8"),
    (NINE_TAPS | {"kind": "additive_expanded"}, 128, H200, "XLA: 9 taps are outside 1 to 8; nearest: 8"),
    ({"kind": "additive_expanded"}, 128, H200, ""),
    ({"kind": "additive"}, 128, H200, ""),
], ids=str)  # fmt: skip
def test_what_runs_is_said_with_the_reason(changes, width, where, expected):
    assert explain(ResidualConfig(**changes).resolve(width), width, [where]) == expected


def test_a_gpu_that_is_no_hopper_is_refused_in_one_line():
    config = ResidualConfig(kernel="pallas").resolve(128)
    message = "^model.residual.kernel 'pallas' cannot run: NVIDIA A100 is not a Hopper GPU; use 'auto'$"
    with pytest.raises(InputError, match=message):
        explain(config, 128, [A100])


@pytest.mark.parametrize("kernel, where, expected", [
    ("auto", CPU, "xla"),
    ("auto", H200, "auto"),
    ("auto", A100, "auto"),
    ("pallas", CPU, "pallas"),
    ("xla", H200, "xla"),
])  # fmt: skip
def test_auto_is_decided_early_only_where_no_gpu_is_compiled_for(kernel, where, expected):
    assert decided(ResidualConfig(kernel=kernel), [where]).kernel == expected


TRACED = """
import sys
import jax
from tests.transformer.test_kernels import STREAMS, abstract, configuration, step

config = configuration(STREAMS["CC"])
step(config, jax.devices()).trace(*abstract(config))
print("pallas_kernels.rewrite.mosaic_gpu" in sys.modules)
step(config).trace(*abstract(config))
print("pallas_kernels.rewrite.mosaic_gpu" in sys.modules)
"""


def test_a_training_start_on_a_cpu_does_not_pay_for_kernels():
    """Importing Pallas and tracing the kernels takes about half a second."""
    assert python(TRACED).stdout.split() == ["False", "True"]
