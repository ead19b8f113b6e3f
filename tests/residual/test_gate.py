"""Known answers: with k and v fixed and only the gate trained, β goes where the answer lies."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddl_jax.config import GateConfig
from ddl_jax.residual.gate import Gate
from pallas_kernels import rewrite

WIDTH, TOKENS = 16, 8


@pytest.mark.parametrize("hidden", [0, 8])
def test_the_gate_computes_its_equation_in_float32(hidden):
    gate = Gate(GateConfig(hidden=hidden, hidden_bias=True if hidden else None, initial=1.3), WIDTH, nnx.Rngs(0))
    if hidden:
        gate.hidden_bias[...] = jnp.linspace(-1, 1, hidden)
    context = jax.random.normal(jax.random.key(0), (2, TOKENS, WIDTH)).astype(jnp.bfloat16)
    c = np.asarray(context, np.float64)
    if hidden:
        c = np.tanh(c @ np.asarray(gate.hidden[...], np.float64) + np.linspace(-1, 1, hidden))
    logit = c @ np.asarray(gate.output[...], np.float64) + np.log(0.65 / 0.35)
    β = gate(context)
    assert β.dtype == jnp.float32
    np.testing.assert_allclose(β, 2 / (1 + np.exp(-logit)), rtol=1e-5)  # the logit is a float32 sum, not a bfloat16 one


@pytest.mark.parametrize("hidden", [0, 8])
@pytest.mark.parametrize("answer, β", [("reflection", 2.0), ("overwrite", 1.0), ("identity", 0.0)])
def test_the_gate_finds_reflection_overwrite_and_identity(answer, β, hidden):
    rng = np.random.default_rng(0)
    state = jnp.asarray(rng.standard_normal((1, TOKENS, 2, WIDTH)), jnp.float32)
    branch = jnp.asarray(rng.standard_normal((1, TOKENS, WIDTH)), jnp.float32)
    value = jnp.zeros((1, TOKENS, 2)) if answer == "reflection" else jnp.ones((1, TOKENS, 2))
    context = jnp.ones((1, TOKENS, WIDTH))
    k = np.asarray(branch / jnp.linalg.norm(branch, axis=-1, keepdims=True), np.float64)
    readout = np.einsum("btd,btjd->btj", k, state)
    target = {
        "reflection": state - 2 * np.einsum("btj,btd->btjd", readout, k),  # the Householder mirror of each channel
        "overwrite": state + np.einsum("btj,btd->btjd", value - readout, k),
        "identity": state,
    }[answer]
    initial = 0.5 if answer == "overwrite" else 1.0
    hidden_bias = True if hidden else None
    gate = Gate(GateConfig(hidden=hidden, hidden_bias=hidden_bias, initial=initial), WIDTH, nnx.Rngs(0))
    graph, parameters = nnx.split(gate)

    def loss(parameters):
        new = rewrite(state, branch, value, nnx.merge(graph, parameters)(context))
        return jnp.mean(jnp.sum((new - target) ** 2, axis=(-2, -1)))

    @jax.jit
    def descend(parameters):
        def step(_, p):
            return jax.tree.map(lambda a, g: a - 0.01 * g, p, jax.grad(loss)(p))

        return jax.lax.fori_loop(0, 1500, step, parameters)

    before = nnx.merge(graph, parameters)(context)
    trained = descend(parameters)
    after = nnx.merge(graph, trained)(context)
    assert np.all(np.abs(after - β) < 0.1), after
    assert np.all(np.abs(before - β) > 0.2), before
    assert loss(trained) < 0.02 * loss(parameters)
