"""`model.residual.backward: reversible` and `model.remat`: the same gradients, and what is kept for them."""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddl_jax.config import Config, GateConfig, ResidualConfig, TrainingConfig, TransformerConfig, ValueConfig
from ddl_jax.training.step import Batch, init_state, make_train_step, model_graph, total_nats
from pallas_kernels.traffic.jaxprs import inner_jaxprs
from tests.quick import QUICK
from tests.training.runs import python

LAYERS, BATCH, TOKENS, WIDTH, HEADS = 3, 2, 8, 12, 2
STREAMS = {
    "CC": ResidualConfig(),
    "CC without EC": ResidualConfig(value_channels=2, expansion="repeat"),
    "TC": ResidualConfig(value_channels=2, reader="token"),
    "TC without EC": ResidualConfig(value_channels=2, reader="token", expansion="repeat"),
    "scalar": ResidualConfig(value_channels=1),
    "scalar with a reader": ResidualConfig(value_channels=1, reader="channel", expansion="convolution"),
    "write-only": ResidualConfig(kind="write_only", gate=GateConfig(hidden=5)),
    "official": ResidualConfig(preset="official_code"),
    "official TC": ResidualConfig(preset="official_code", reader="token", value_channels=2),
    "value of the branch": ResidualConfig(value_channels=2, value=ValueConfig(source="branch")),
    "constant value": ResidualConfig(value_channels=1, value=ValueConfig(constant=2.0)),
    "mlp direction": ResidualConfig(value_channels=2, direction="mlp"),
    "attention direction": ResidualConfig(value_channels=2, direction="attention"),
}
POLICIES = ("none", "elementwise", "branch", "layer")
every_stream = pytest.mark.parametrize("name", STREAMS)


def configuration(name, backward="saved", remat="none", *, layers=LAYERS, micro=BATCH) -> Config:
    residual = dataclasses.replace(STREAMS[name], backward=backward)
    model = TransformerConfig(
        layers=layers, width=WIDTH, heads=HEADS, vocab_size=13, context_length=TOKENS, remat=remat, residual=residual
    )
    return Config(model=model, training=TrainingConfig(batch_size=BATCH, microbatch_size=micro)).resolve()


@functools.cache
def parameters_and_batch(name):
    """Other parameters than at the start, where some gradients are 0."""
    parameters = init_state(configuration(name)).parameters
    rng = np.random.default_rng(0)
    parameters = jax.tree.map(lambda p: p + jnp.asarray(0.1 * rng.standard_normal(p.shape), p.dtype), parameters)
    return parameters, Batch(*jnp.asarray(rng.integers(0, 13, (2, BATCH, TOKENS)), jnp.int32))


def nats(config):
    graph = model_graph(config, jax.devices())
    return lambda parameters, batch: total_nats(nnx.merge(graph, parameters), batch)


@functools.cache
def gradient(name, backward, remat):
    return jax.jit(jax.value_and_grad(nats(configuration(name, backward, remat))), compiler_options=QUICK)(
        *parameters_and_batch(name)
    )


def assert_equal_gradients(found, expected):
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        scale = np.max(np.abs(b))
        assert scale > 0, path
        # The same in float32 but for the order of sums and the rounding of what is had again: seen up to 1e-6.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * scale, err_msg=jax.tree_util.keystr(path))


@every_stream
def test_backward_without_states_gives_the_same_gradients(name):
    # The policies in turn: each with a few of the streams, and all with CC below.
    policy = POLICIES[list(STREAMS).index(name) % len(POLICIES)]
    assert_equal_gradients(gradient(name, "reversible", policy), gradient(name, "saved", "none"))


@pytest.mark.parametrize("backward", ["saved", "reversible"])
@pytest.mark.parametrize("remat", POLICIES)
def test_every_policy_gives_the_same_gradients(remat, backward):
    assert_equal_gradients(gradient("CC", backward, remat), gradient("CC", "saved", "none"))


def kept(name, backward, remat, layers=LAYERS) -> list[tuple[int, ...]]:
    """The shapes of what forward gives to backward for each layer and token; parameters are left out."""
    config = configuration(name, backward, remat, layers=layers)
    parameters = jax.eval_shape(lambda: init_state(config).parameters)
    shape = jax.ShapeDtypeStruct((BATCH, TOKENS), jnp.int32)

    def transposed(parameters, batch):
        return jax.vjp(lambda p: nats(config)(p, batch), parameters, saveable_args=False)[1]

    shapes = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(transposed, parameters, Batch(shape, shape)))]
    return [shape for shape in shapes if shape[:3] == (layers, BATCH, TOKENS)]


def stacks_of_states(shapes, channels) -> list[tuple[int, ...]]:
    """Those that hold a state for each layer, in whatever order of axes."""
    return [shape for shape in shapes if np.prod(shape[3:]) == channels * WIDTH and WIDTH in shape]


@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize("name", [name for name in STREAMS if STREAMS[name].value_channels != 1])
def test_no_stack_of_states_is_kept(name, remat):
    channels = STREAMS[name].value_channels or 4
    assert not stacks_of_states(kept(name, "reversible", remat), channels)
    # And the question can be answered otherwise: a layer has two states, of which the policy `layer` keeps the first.
    assert len(stacks_of_states(kept(name, "saved", remat), channels)) >= (1 if remat == "layer" else 2)


def elements(name, backward, remat) -> int:
    """How many numbers are kept per layer and token."""
    return sum(int(np.prod(shape[3:])) for shape in kept(name, backward, remat))


def test_what_a_layer_keeps():
    V, hidden = 4, 8 * WIDTH // 3
    products = 3 * WIDTH + WIDTH + 2 * hidden  # q, k, v; what the heads gave; both inputs of the MLP's product
    products += 2 * (V + 1)  # and what v and β are made of, in both sublayers
    edits, h = 2 * (V + 1), 2 * WIDTH  # w and β, and h, of both sublayers
    assert elements("CC", "reversible", "elementwise") == products + edits + h
    assert elements("CC", "reversible", "branch") == products + edits
    assert elements("CC", "reversible", "layer") == edits + h
    assert elements("CC", "saved", "elementwise") == products + h + 2 * (V + 1) * WIDTH  # X and x
    assert elements("CC", "saved", "branch") == products + 2 * (V + 1) * WIDTH
    assert elements("CC", "saved", "layer") == (V + 1) * WIDTH
    # XLA's attention, RoPE, silu and the norms keep their own.
    assert elements("CC", "saved", "none") > 1.4 * elements("CC", "saved", "elementwise")


def softmaxes(backward, remat) -> int:
    """How often a gradient computes one."""

    def count(jaxpr):
        inner = [count(sub) for equation in jaxpr.eqns for sub in inner_jaxprs(equation.params)]
        return sum(equation.primitive.name == "reduce_max" for equation in jaxpr.eqns) + sum(inner)

    gradient = jax.make_jaxpr(jax.grad(nats(configuration("CC", backward, remat))))
    return count(gradient(*parameters_and_batch("CC")).jaxpr)


@pytest.mark.parametrize("backward", ["saved", "reversible"])
def test_attention_is_computed_again_only_once(backward):
    assert softmaxes(backward, "layer") == 3  # attention's in forward and backward, and the loss's


def test_a_step_with_accumulation_and_the_chunked_loss():
    """Two microbatches, a loss in several chunks, and the optimiser: the same metrics and parameters."""

    def stepped(backward, remat):
        config = configuration("CC", backward, remat, micro=1)
        parameters, batch = parameters_and_batch("CC")
        state = init_state(config)._replace(parameters=parameters)
        return jax.jit(make_train_step(model_graph(config, jax.devices()), config), compiler_options=QUICK)(
            state, batch
        )

    (walked, metrics), (expected, expected_metrics) = stepped("reversible", "branch"), stepped("saved", "none")
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    assert_equal_gradients(walked.optimizer[1][0].mu, expected.optimizer[1][0].mu)


# The gradients of one model in several precisions.
GRADIENTS = """
import sys
import jax
import jax.numpy as jnp
import numpy as np

precision, folder = sys.argv[1:]
if precision == "float64":
    jax.config.update("jax_enable_x64", True)
from flax import nnx
from ddl_jax.config import Config, GateConfig, ResidualConfig, TrainingConfig, TransformerConfig
from ddl_jax.training.step import Batch, init_state, model_graph, total_nats
from tests.quick import QUICK

wide = jnp.zeros(()).dtype  # of parameters

def configuration(backward, dtype):
    model = TransformerConfig(
        layers=24, width=32, heads=2, vocab_size=64, context_length=32, compute_dtype=dtype, state_dtype=dtype,
        remat="elementwise", residual=ResidualConfig(backward=backward, gate=GateConfig(initial=0.2)),
    )
    return Config(model=model, training=TrainingConfig(batch_size=2)).resolve()

def gradient(backward, dtype):
    config = configuration(backward, dtype)
    tree = jax.tree.structure(jax.eval_shape(lambda: init_state(config).parameters))
    stored = np.load(f"{folder}/parameters.npz")
    parameters = tree.unflatten([jnp.asarray(stored[name], wide) for name in stored])
    batch = Batch(*jnp.asarray(np.random.default_rng(1).integers(0, 64, (2, 2, 32)), jnp.int32))
    graph = model_graph(config)
    f = jax.grad(lambda p: total_nats(nnx.merge(graph, p), batch))
    leaves = jax.tree.leaves(jax.jit(f, compiler_options=QUICK)(parameters))
    assert all(leaf.dtype == wide for leaf in leaves)
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in leaves])

if precision == "narrow":
    rng = np.random.default_rng(0)
    initial = jax.tree.leaves(init_state(configuration("saved", "float32")).parameters)
    # Tokens as far apart as in a trained model, and gates that leave most of the state: with the initial 0.02 and 1,
    # 24 layers of random weights are chaotic, and no gradient in bfloat16 is like the true one.
    initial = [50 * p if p.shape == (64, 32) else p for p in initial]
    moved = [p + 0.1 * (np.std(p) or 0.3) * rng.standard_normal(p.shape).astype(np.float32) for p in initial]
    np.savez(f"{folder}/parameters.npz", *moved)
    for backward in ("saved", "reversible"):
        for dtype in ("float32", "bfloat16"):
            np.save(f"{folder}/{backward} {dtype}.npy", gradient(backward, dtype))
else:
    np.save(f"{folder}/float64.npy", gradient("saved", "float64"))
"""


def test_the_walk_back_adds_no_error_worth_the_name(tmp_path):
    """At 24 layers, in float32 and bfloat16, against float64."""
    for precision in ("narrow", "float64"):
        result = python(GRADIENTS, precision, str(tmp_path))
        assert result.returncode == 0, result.stderr
    truth = np.load(tmp_path / "float64.npy")

    def error(name):
        return np.linalg.norm(np.load(tmp_path / f"{name}.npy") - truth) / np.linalg.norm(truth)

    assert 1e-7 < error("saved float32") < 1e-4  # it is the same model, and float64 is another precision
    assert error("reversible float32") <= 1.5 * error("saved float32")
    assert 1e-3 < error("saved bfloat16") < 0.5
    assert error("reversible bfloat16") <= 1.05 * error("saved bfloat16")
