"""One optimiser step."""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddl_jax.config import Config, OptimizerConfig, ResidualConfig, TrainingConfig, TransformerConfig
from ddl_jax.training.step import Batch, init_state, make_evaluation_step, make_train_step, model_graph, total_nats
from tests.quick import QUICK

KINDS = {
    "additive": ResidualConfig(kind="additive"),
    "additive_expanded": ResidualConfig(kind="additive_expanded", value_channels=2),
    "write_only": ResidualConfig(kind="write_only", value_channels=2),
    "delta": ResidualConfig(value_channels=2),
}


def configuration(kind="delta", layers=2, micro=4, unroll=1, rate=1e-2):
    model = TransformerConfig(layers=layers, width=8, heads=2, vocab_size=13, context_length=6, residual=KINDS[kind])
    return Config(
        model=model,
        optimizer=OptimizerConfig(learning_rate=rate, warmup_steps=4, clip_norm=1e9),
        training=TrainingConfig(steps=100, batch_size=4, microbatch_size=micro, unroll=unroll),
    ).resolve()


def batch(ignored=0.0):
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, 13, (2, 4, 6)).astype(np.int32)
    uneven = np.array([0.0, 1.8, 0.1, 1.2])[:, None]  # one sequence counts nearly nothing, another everything
    return Batch(jnp.asarray(tokens), jnp.asarray(np.where(rng.random((4, 6)) < ignored * uneven, -1, targets)))


@functools.cache
def compiled(config):
    return jax.jit(make_train_step(model_graph(config), config), compiler_options=QUICK)


@functools.cache
def first_state(config):
    return jax.jit(lambda: init_state(config), compiler_options=QUICK)()


def test_accumulation_equals_the_full_batch_wherever_ignored_targets_are():
    """A known bug: accumulation averaged per micro-batch instead of per token."""
    uneven = batch(ignored=0.5)
    counts = np.sum(np.asarray(uneven.targets) != -1, axis=1)
    assert len(set(counts.tolist())) > 2
    results = []
    for micro in (4, 1):
        config = configuration(micro=micro)
        state, metrics = compiled(config)(first_state(config), uneven)
        results.append((metrics, state.optimizer, state.parameters))
    for metrics, optimizer, _parameters in results[1:]:
        assert metrics["loss"] == pytest.approx(float(results[0][0]["loss"]), rel=1e-6)
        assert metrics["grad_norm"] == pytest.approx(float(results[0][0]["grad_norm"]), rel=1e-5)
        for actual, expected in zip(jax.tree.leaves(optimizer), jax.tree.leaves(results[0][1]), strict=True):
            scale = (
                np.max(np.abs(expected)) + 1e-12
            )  # the first moment is a tenth of the gradient: compared entry by entry
            np.testing.assert_allclose(actual, expected, atol=1e-5 * scale)


def test_the_loss_is_the_mean_over_counted_targets_and_its_gradient_is_reported():
    config, uneven = configuration(), batch(ignored=0.5)
    state = first_state(config)
    _, metrics = compiled(config)(state, uneven)
    graph = model_graph(config)
    model = nnx.merge(graph, state.parameters)
    logits = np.asarray(jax.jit(lambda m: m(uneven.tokens), compiler_options=QUICK)(model), np.float64)
    targets = np.asarray(uneven.targets)
    logs = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    counted = targets != -1
    expected = -np.mean(np.take_along_axis(logs, np.maximum(targets, 0)[..., None], -1)[..., 0][counted])
    assert metrics["loss"] == pytest.approx(expected, rel=1e-5)

    def loss(p):
        return total_nats(nnx.merge(graph, p), uneven) / counted.sum()

    gradient = jax.jit(jax.grad(loss), compiler_options=QUICK)(state.parameters)
    norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(gradient)))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    evaluate = jax.jit(make_evaluation_step(graph, config), compiler_options=QUICK)
    np.testing.assert_allclose(evaluate(state.parameters, uneven), expected * counted.sum(), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls_on_a_fixed_batch_and_every_parameter_moves(kind):
    config, fixed = configuration(kind), batch()
    step = compiled(config)
    state = start = first_state(config)
    losses = []
    for _ in range(40):
        state, metrics = step(state, fixed)
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(np.log(13), rel=0.02)  # logits start near zero
    assert losses[-1] < 0.8 * losses[0]
    assert int(state.step) == 40
    for (path, before), after in zip(
        nnx.to_flat_state(start.parameters), jax.tree.leaves(state.parameters), strict=True
    ):
        assert np.max(np.abs(before[...] - after)) > 1e-3, path


def test_the_parameter_norm_is_that_of_the_new_parameters():
    config = configuration(rate=1.0)
    state = first_state(config)
    for _ in range(2):  # the first step has learning rate 0
        state, metrics = compiled(config)(state, batch())
    squares = sum(float(np.sum(np.square(leaf, dtype=np.float64))) for leaf in jax.tree.leaves(state.parameters))
    np.testing.assert_allclose(metrics["parameter_norm"], squares**0.5, rtol=1e-6)


def test_the_learning_rate_is_that_of_the_step_being_taken():
    config = configuration()
    step, state = compiled(config), first_state(config)
    rates = []
    for _ in range(5):
        before = state.parameters
        state, metrics = step(state, batch())
        rates.append(float(metrics["learning_rate"]))
        if len(rates) == 1:  # at rate 0 nothing moves
            jax.tree.map(np.testing.assert_array_equal, before, state.parameters)
    np.testing.assert_allclose(rates, 1e-2 * np.arange(5) / 4, rtol=1e-6)


def test_the_first_state_is_a_function_of_the_seed():
    config = configuration()
    first, again, other = (
        jax.jit(lambda s=s: init_state(dataclasses.replace(config, seed=s)), compiler_options=QUICK)()
        for s in (0, 0, 1)
    )
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert np.any(first.parameters["embedding"][...] != other.parameters["embedding"][...])


def test_the_compiled_step_reuses_the_memory_of_the_state():
    config = configuration()
    state = jax.eval_shape(lambda: init_state(config))
    step = jax.jit(make_train_step(model_graph(config), config), donate_argnums=0)
    memory = step.lower(state, batch()).compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def program_sizes(layers, unroll):
    config = configuration(layers=layers, unroll=unroll)
    state = jax.eval_shape(lambda: init_state(config))
    traced = jax.jit(make_train_step(model_graph(config), config)).trace(state, batch())
    return len(str(traced.jaxpr)), len(traced.lower().as_text())


def test_the_program_does_not_grow_with_depth():
    shallow, deep = program_sizes(layers=2, unroll=1), program_sizes(layers=12, unroll=1)
    for few, many in zip(shallow, deep, strict=True):
        # Longer numbers in shapes (12 for 2), and one index per connection to its reader: no operation more.
        assert many < 1.03 * few
    assert program_sizes(layers=2, unroll=2)[1] > 1.01 * shallow[1]  # what the comparison can see
