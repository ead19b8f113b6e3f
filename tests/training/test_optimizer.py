"""Decay by role, the schedule, the clip."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ddl_jax.config import GateConfig, OptimizerConfig, ResidualConfig, TransformerConfig
from ddl_jax.parameters import weight
from ddl_jax.training.optimizer import decays, learning_rate_schedule, make_optimizer
from ddl_jax.transformer import Transformer

DECAYING = {
    "embedding",
    "blocks/attention/qkv", "blocks/attention/output", "blocks/mlp/input", "blocks/mlp/output",
    "stream/expansion/taps", "stream/readers/taps", "stream/readers/pool",
    "stream/updates/gate/hidden", "stream/updates/gate/output", "stream/updates/value/weight",
}  # fmt: skip
NOT_DECAYING = {
    "final_norm/gain", "blocks/attention_norm/gain", "blocks/mlp_norm/gain",
    "blocks/attention/query_norm/gain", "blocks/attention/key_norm/gain",
    "stream/updates/gate/hidden_bias", "stream/updates/gate/bias", "stream/updates/value/bias",
}  # fmt: skip
PAPER = {"stream/readers/mix"}
DIRECTION = {"mlp": ("input", "output"), "attention": ("query", "key", "value", "output")}


def parameters_of(layers, residual):
    config = TransformerConfig(layers=layers, width=8, heads=2, vocab_size=11, residual=residual)
    return nnx.state(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))), nnx.Param)


def split_by_decay(parameters):
    found = {True: set(), False: set()}
    for path, variable in nnx.to_flat_state(decays(parameters)):
        found[variable.get_value()].add("/".join(map(str, path)))
    return found[True], found[False]


@pytest.mark.parametrize("layers", [1, 3])
def test_weights_decay_and_gains_and_biases_do_not_at_every_depth(layers):
    """By role, not by number of dimensions: a stack of gains is a matrix, and a gate's weight is a vector."""
    gate = GateConfig(hidden=4, hidden_bias=True)
    official = ResidualConfig(preset="official_code", gate=gate)
    assert split_by_decay(parameters_of(layers, official)) == (DECAYING, NOT_DECAYING)
    paper = split_by_decay(parameters_of(layers, ResidualConfig(gate=gate)))
    official_only = {"stream/readers/taps", "stream/readers/pool"}
    assert paper == (DECAYING - official_only | PAPER, NOT_DECAYING - {"stream/updates/value/bias"})


@pytest.mark.parametrize("kind", ["hyper_connections", "mhc"])
def test_what_makes_matrices_of_the_token_decays_and_their_static_parts_and_scales_do_not(kind):
    decaying, not_decaying = split_by_decay(parameters_of(2, ResidualConfig(kind=kind)))
    stream = [{path for path in paths if "stream" in path} for paths in (decaying, not_decaying)]
    parts = ("readers/{}", "updates/output_{}", "updates/mixing_{}")
    assert stream[0] == {f"stream/{part.format('weight')}" for part in parts}
    assert stream[1] == {f"stream/{part.format(name)}" for part in parts for name in ("scale", "static")}


@pytest.mark.parametrize("direction", DIRECTION)
def test_the_weights_of_directions_decay(direction):
    decaying, _ = split_by_decay(parameters_of(1, ResidualConfig(direction=direction)))
    names = {f"stream/updates/direction/{name}" for name in DIRECTION[direction]}
    assert {path for path in decaying if "direction" in path} == names


def test_decay_shrinks_weights_and_leaves_the_rest():
    config = OptimizerConfig(learning_rate=0.5, warmup_steps=0, weight_decay=0.1)
    parameters = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), parameters_of(1, ResidualConfig()))
    optimizer = make_optimizer(config, steps=10)
    zero = jax.tree.map(jnp.zeros_like, parameters)
    updates, _ = jax.jit(optimizer.update)(zero, optimizer.init(parameters), parameters)
    after = dict(nnx.to_flat_state(optax.apply_updates(parameters, updates)))
    decaying, _ = split_by_decay(parameters)
    for path, before in nnx.to_flat_state(parameters):
        factor = 1 - 0.5 * 0.1 if "/".join(map(str, path)) in decaying else 1
        np.testing.assert_allclose(after[path][...], factor * before[...], rtol=1e-6)


def test_the_schedule_warms_up_and_ends_where_it_should():
    config = OptimizerConfig(learning_rate=2e-3, warmup_steps=10, final_fraction=0.1)
    schedule = learning_rate_schedule(config, steps=110)
    expected = {0: 0, 5: 1e-3, 10: 2e-3, 60: (2e-3 + 2e-4) / 2, 110: 2e-4}
    for step, rate in expected.items():
        np.testing.assert_allclose(schedule(step), rate, rtol=1e-5, atol=1e-12)  # float32 cosine
    quarter = 2e-4 + (2e-3 - 2e-4) * (1 + np.cos(np.pi / 4)) / 2
    np.testing.assert_allclose(schedule(35), quarter, rtol=1e-5)


def test_the_schedule_without_warm_up_starts_at_the_peak():
    schedule = learning_rate_schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=0, final_fraction=0.0), steps=4)
    np.testing.assert_allclose(
        [schedule(step) for step in range(5)], (1 + np.cos(np.pi * np.arange(5) / 4)) / 2, atol=1e-6
    )


def adamw(gradients, config, rates, parameter):
    """AdamW with clipping, step by step, in float64."""
    first = second = np.zeros_like(parameter)
    for n, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        gradient = gradient * min(1, config.clip_norm / np.linalg.norm(gradient))
        first = config.betas[0] * first + (1 - config.betas[0]) * gradient
        second = config.betas[1] * second + (1 - config.betas[1]) * gradient**2
        step = first / (1 - config.betas[0] ** n) / (np.sqrt(second / (1 - config.betas[1] ** n)) + 1e-8)
        parameter = parameter - rate * (step + config.weight_decay * parameter)
    return parameter


@pytest.mark.parametrize("clip_norm", [0.5, 100.0])
def test_the_chain_is_clip_then_adamw_then_the_schedule(clip_norm):
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=2, clip_norm=clip_norm, betas=(0.8, 0.9), weight_decay=0.3)
    rng = np.random.default_rng(0)
    start, gradients = rng.standard_normal(5), rng.standard_normal((4, 5)) * np.array([1, 5, 0.1, 2])[:, None]
    parameters = nnx.State({"w": weight(jnp.asarray(start, jnp.float32))})
    optimizer = make_optimizer(config, steps=8)
    state = optimizer.init(parameters)
    for gradient in gradients:
        updates, state = optimizer.update(
            nnx.State({"w": weight(jnp.asarray(gradient, jnp.float32))}), state, parameters
        )
        parameters = optax.apply_updates(parameters, updates)
    rates = [float(learning_rate_schedule(config, 8)(step)) for step in range(4)]
    np.testing.assert_allclose(parameters["w"][...], adamw(gradients, config, rates, start), rtol=1e-5)
