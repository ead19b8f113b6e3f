"""The training step on a mesh: the same numbers as on one device, and no more exchanged than it takes."""

import dataclasses
import json
import math
import subprocess
import sys

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import pytest

from ddl_jax.config import MeshConfig, TransformerConfig
from ddl_jax.errors import InputError
from ddl_jax.partition import BATCH_AXES, spec
from ddl_jax.training.sharding import make_mesh, part_of, placed_batch, placed_state
from ddl_jax.training.step import init_state, make_train_step, model_graph
from ddl_jax.transformer import Transformer
from pallas_kernels import hopper
from tests.h200 import needs_compiler
from tests.quick import QUICK
from tests.residual.streams import STREAMS
from tests.training.on_eight_devices import ALL, BATCH, CASES, FSDP, TOKENS, configuration
from tests.training.runs import ROOT, environment


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What `on_eight_devices` has found."""
    file = tmp_path_factory.mktemp("eight") / "found.json"
    command = [sys.executable, "-m", "tests.training.on_eight_devices", str(file)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=600)
    return json.loads(file.read_text())


def test_every_kind_reader_and_direction_is_among_the_cases():
    cases = [STREAMS[name].resolve(24) for name in CASES]
    for setting in ("kind", "reader", "direction", "preset", "expansion"):
        known = {getattr(stream.resolve(24), setting) for stream in STREAMS.values()}
        assert {getattr(case, setting) for case in cases} == known, setting


@pytest.mark.parametrize("stream", CASES)
def test_eight_devices_train_as_one_does(found, stream):
    """One device takes the batch at once, eight take one sequence at a time where they have several."""
    run = found["compared"][stream]
    # The same float32 operations with sums in another order. Seen: 3e-7 in losses.
    np.testing.assert_allclose(*run["loss"], rtol=3e-6)
    assert run["loss"][0][-1] < 0.98 * run["loss"][0][0]  # it has learned something
    np.testing.assert_allclose(run["grad_norm"][1][0], run["grad_norm"][0][0], rtol=1e-5)
    assert run["start"] < 1e-6  # the same draws, rounded in other loops
    # Of each parameter, as a share of its norm. Seen: 6e-5 where what is summed nearly cancels, else 7e-6.
    assert run["gradient"] < 3e-4
    assert run["moved"] < 2e-3  # AdamW divides by gradients that are close to nothing. Seen: 1e-4


def test_evaluation_on_eight_devices_is_that_of_one(found):
    one, eight = found["evaluated"]
    assert eight == pytest.approx(one, rel=1e-6)


def test_fsdp_divides_the_parameters(found):
    run = found["compared"]["delta mlp"]
    assert CASES["delta mlp"] == FSDP
    small = 0.06 * run["parameters"]  # gains, readers, gates and values are whole, and few: at width 24, 5 per cent
    assert run["slices"] < run["parameters"] / 8 + small
    run = found["compared"]["additive"]  # over data alone they are not divided
    assert run["slices"] == run["parameters"]


def parameters(stream: str) -> list[nnx.Param]:
    state = jax.eval_shape(lambda: init_state(configuration(stream, {})))
    return jax.tree.leaves(state.parameters, is_leaf=lambda node: isinstance(node, nnx.Variable))


def shapes(collectives: list) -> list[tuple[int, ...]]:
    """Of each result of each collective, those of size 1 left out: sums of squares, the loss."""
    texts = [shape.partition("[")[2].rstrip("]") for text, _ in collectives for shape in text.split(", ")]
    found = [tuple(int(size) for size in text.split(",") if size) for text in texts]
    return [shape for shape in found if math.prod(shape) > 1]


def test_over_data_each_gradient_is_summed_once_a_step_and_nothing_else_is(found):
    """Also where a step has several microbatches, layers in a loop, and chunks of the loss in another."""
    collectives = found["exchanged"]["data"]
    assert collectives.keys() == {"all-reduce"}
    assert sorted(shapes(collectives["all-reduce"])) == sorted(p.shape for p in parameters("delta"))
    assert sum(size for _, size in collectives["all-reduce"]) == 4 * sum(p.size for p in parameters("delta")) + 4 + 4


def test_over_fsdp_parameters_are_gathered_and_gradients_scattered_and_nothing_else_is(found):
    collectives = found["exchanged"]["fsdp"]
    assert collectives.keys() == {"all-gather", "reduce-scatter", "all-reduce"}
    whole, slices, shared = [], [], []
    for parameter in parameters("delta"):
        layers = parameter.ndim - len(parameter.axes)
        if "fsdp" not in spec(parameter):
            shared.append(parameter.shape)
            continue
        shape, axis = list(parameter.shape[layers:]), spec(parameter).index("fsdp") - layers
        whole += [tuple(shape)] * (2 if layers else 1)  # of a layer for forward and again for backward; the embedding
        shape[axis] //= 8
        slices.append(tuple(shape))
    assert len(slices) == 5
    assert sorted(shapes(collectives["all-gather"])) == sorted(whole)
    assert sorted(shapes(collectives["reduce-scatter"])) == sorted(slices)
    assert sorted(shapes(collectives["all-reduce"])) == sorted(shared)


@needs_compiler
def test_for_h200s_the_kernels_run_on_each_device_and_no_collective_has_the_state():
    config = configuration("delta", ALL)
    model = dataclasses.replace(
        config.model, width=256, heads=2, head_dim=128, vocab_size=192, context_length=72,
        compute_dtype="bfloat16", state_dtype="bfloat16",
    )  # fmt: skip
    config = dataclasses.replace(config, model=model).resolve()
    devices = list(hopper.mesh({"any": 8}).devices.flat)
    mesh = make_mesh(config, devices)
    config = config.on(8)
    step = jax.jit(
        make_train_step(model_graph(config, devices), config, mesh),
        donate_argnums=0,
        compiler_options=QUICK | {"xla_gpu_autotune_level": 0},
    )
    compiled = hopper.compile_for(step, placed_state(config, mesh), placed_batch(config, mesh))
    kernels = hopper.kernels(compiled)  # some bodies of loops are written twice, to overlap with collectives
    assert kernels.keys() == {"rewrite_and_read", "rewrite_and_read_reverse"}
    for operation, collectives in hopper.collectives(compiled).items():
        for collective in collectives:
            # The state of one sequence has 72 · 4 · 256 elements. What is summed over tensor has (1, 72, 256).
            for shape in shapes([(collective.shape, 0)]):
                assert (72 in shape) <= (operation == "all-reduce" and math.prod(shape) == 72 * 256), shape
    state = placed_state(config, mesh)
    assert state.parameters["blocks"]["attention"]["qkv"].sharding.spec == PartitionSpec(
        None, "fsdp", None, "tensor", None
    )


@needs_compiler
def test_under_a_mesh_of_auto_axes_a_model_runs_kernels_on_each_device_where_it_is_told_the_axes():
    """Without `token_axes`, XLA would run instead, and say so."""
    residual = dataclasses.replace(STREAMS["delta V4 token"], value_channels=1)
    model = TransformerConfig(layers=1, width=128, heads=1, vocab_size=64, context_length=72, residual=residual)
    mesh = hopper.mesh({"data": 2, "fsdp": 2, "tensor": 1})

    def forward(parameters, tokens):
        return nnx.merge(graph, parameters).features(tokens)

    graph, parameters = nnx.split(nnx.eval_shape(lambda: Transformer(model, rngs=nnx.Rngs(0), token_axes=BATCH_AXES)))

    def on_mesh(leaf, spec=PartitionSpec()):  # noqa: B008, it is frozen
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    tokens = on_mesh(jax.ShapeDtypeStruct((4, 72), jnp.int32), PartitionSpec(BATCH_AXES))
    with jax.set_mesh(mesh):
        step = jax.jit(forward, compiler_options=QUICK | {"xla_gpu_autotune_level": 0})
        compiled = hopper.compile_for(step, jax.tree.map(on_mesh, parameters), tokens)
    assert hopper.kernels(compiled).keys() == {"rewrite", "token_read"}
    assert hopper.collectives(compiled) == {}


def test_the_state_and_batch_of_one_device():
    config = configuration("delta", {})
    mesh = make_mesh(config, jax.devices()[:1])
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 1}
    batch = placed_batch(config, mesh)
    assert batch.tokens.shape == batch.targets.shape == (BATCH, TOKENS) and batch.tokens.dtype == jnp.int32
    with pytest.raises(InputError, match="mesh.data 3 .* not the number of devices, 1; nearest: 1, or -1"):
        make_mesh(dataclasses.replace(config, mesh=MeshConfig(data=3)), jax.devices()[:1])


@pytest.mark.parametrize("start, stop, expected", [
    (0, 30, (0, 1)), (10, 20, (1, 3)), (25, 30, (5, 6)), (0, 12, (0, 1)), (12, 24, (0, 1)), (5, 15, (0, 1)),
])  # fmt: skip
def test_rows_are_an_equal_part_or_all(start, stop, expected):
    """As where `tensor` straddles processes: (0, 12) of 30 are no equal part."""
    assert part_of(start, stop, 30) == expected
