"""Hyper-connections and mHC: their equations, written out once more in NumPy, and where they start."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ddl_jax.config import ResidualConfig, TransformerConfig
from ddl_jax.parameters import at
from ddl_jax.residual import DeltaStream
from ddl_jax.residual.mhc import sinkhorn
from ddl_jax.transformer import Transformer
from tests.quick import QUICK

WIDTH, SUBLAYERS = 6, 3
CONFIGS = {
    "hyper_connections": ResidualConfig(kind="hyper_connections"),
    "static": ResidualConfig(kind="hyper_connections", value_channels=3, dynamic=False),
    "mhc": ResidualConfig(kind="mhc", value_channels=3),
}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def static(n, H, pre, post, d):
    return pre["static"], post["output_static"], post["mixing_static"].T


def hyper_connections(n, H, pre, post, d):
    """A_m, B and A_rᵀ (arXiv 2409.19606, eq. 10 to 13)."""
    unit = H / np.sqrt(np.mean(H**2, axis=1, keepdims=True) + 1e-5)
    A_m = pre["scale"] * np.tanh(unit @ pre["weight"])[:, 0] + pre["static"]
    B = post["output_scale"] * np.tanh(unit @ post["output_weight"])[:, 0] + post["output_static"]
    A_r = post["mixing_scale"] * np.tanh(unit @ post["mixing_weight"]) + post["mixing_static"]
    return A_m, B, A_r.T


def mhc(n, H, pre, post, d):
    """m_pre, m_post and M_res (arXiv 2512.24880, eq. 7 to 9)."""
    x = H.ravel() / np.sqrt(np.mean(H**2) + 1e-5)
    m_pre = sigmoid(pre["scale"] * (x @ pre["weight"]) + pre["static"])
    m_post = 2 * sigmoid(post["output_scale"] * (x @ post["output_weight"]) + post["output_static"])
    logits = post["mixing_scale"] * (x @ post["mixing_weight"]).reshape(n, n) + post["mixing_static"]
    M = np.exp(logits)
    for _ in range(20):
        M = M / M.sum(axis=1, keepdims=True)
        M = M / M.sum(axis=0, keepdims=True)
    return m_pre, m_post, M


EQUATIONS = {"hyper_connections": hyper_connections, "static": static, "mhc": mhc}


def generic(config):
    graph, parameters = nnx.split(DeltaStream(config, width=WIDTH, sublayers=SUBLAYERS, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    draw = lambda leaf: jnp.asarray(0.7 * rng.standard_normal(leaf.shape), jnp.float32)  # noqa: E731
    return nnx.merge(graph, jax.tree.map(draw, parameters))


def in_float64(module):
    return {path[0]: np.asarray(leaf[...], np.float64) for path, leaf in nnx.to_flat_state(nnx.state(module))}


@pytest.mark.parametrize("name", CONFIGS)
def test_read_write_and_final_read_are_the_papers_equations(name):
    stream = generic(CONFIGS[name])
    n = stream.config.value_channels
    rng = np.random.default_rng(1)
    state, branch = rng.standard_normal((2, 5, n, WIDTH)), rng.standard_normal((2, 5, WIDTH))
    X, h = jnp.asarray(state, jnp.float32), jnp.asarray(branch, jnp.float32)
    read, written, reduced = stream.read(X, 1), stream.write(X, h, h, h, 1), stream.reduce(X)
    distance = stream.diagnostics(X, h, h, h, 1)["mixing_distance"]
    pre, post = in_float64(at(stream.readers, 1)), in_float64(at(stream.updates, 1))
    for token in np.ndindex(2, 5):
        H = state[token]
        m_pre, m_post, M_res = EQUATIONS[name](n, H, pre, post, WIDTH)
        np.testing.assert_allclose(read[token], m_pre @ H, atol=1e-5)
        np.testing.assert_allclose(written[token], M_res @ H + np.outer(m_post, branch[token]), atol=1e-5)
        np.testing.assert_allclose(reduced[token], H.sum(axis=0), atol=1e-5)
        np.testing.assert_allclose(distance[token], np.linalg.norm(M_res - np.eye(n)), rtol=1e-4)
        assert np.linalg.norm(M_res - np.eye(n)) > 0.1  # it mixes


def test_the_final_read_has_no_parameters():
    for config in CONFIGS.values():
        stream = generic(config)
        leaves = jax.tree.leaves((stream.readers, stream.updates))
        assert all(len(leaf) == SUBLAYERS for leaf in leaves)


def model(residual, layers=2):
    config = TransformerConfig(
        layers=layers, width=16, heads=2, context_length=12, vocab_size=20, residual=residual, qk_norm=True
    )
    return Transformer(config, rngs=nnx.Rngs(0))


def tokens():
    return np.random.default_rng(0).integers(0, 20, (2, 12), np.int32)


def logits(residual):
    made = model(residual)
    # A larger embedding: beside that drawn the last norm's ε counts, and less so beside a sum of n such streams.
    made.embedding[...] = 100 * made.embedding[...]
    return np.asarray(jax.jit(lambda model: model(tokens()), compiler_options=QUICK)(made))


@pytest.mark.parametrize("channels, dynamic", [(1, True), (2, False), (4, True)])
def test_hyper_connections_start_as_the_plain_transformer(channels, dynamic):
    plain = logits(ResidualConfig(kind="additive"))
    found = logits(ResidualConfig(kind="hyper_connections", value_channels=channels, dynamic=dynamic))
    np.testing.assert_allclose(found, plain, atol=1e-5 * np.abs(plain).max())


def test_sublayers_start_with_streams_in_turn():
    stream = DeltaStream(
        ResidualConfig(kind="hyper_connections", value_channels=3), width=4, sublayers=5, rngs=nnx.Rngs(0)
    )
    np.testing.assert_array_equal(stream.readers.static[...], np.eye(3)[[0, 1, 2, 0, 1]])


@pytest.mark.parametrize("channels", [2, 8])
def test_the_mean_over_the_streams_of_mhc_starts_as_a_plain_residual(channels):
    stream = DeltaStream(ResidualConfig(kind="mhc", value_channels=channels), width=4, sublayers=3, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    state = jnp.asarray(rng.standard_normal((2, 3, channels, 4)), jnp.float32)
    h = jnp.asarray(rng.standard_normal((2, 3, 4)), jnp.float32)
    for i in range(3):
        written = stream.write(state, h, h, h, i)
        np.testing.assert_allclose(jnp.mean(written, axis=2), jnp.mean(state, axis=2) + h, atol=1e-6)
        copies = jnp.broadcast_to(h[:, :, None], state.shape)
        np.testing.assert_allclose(stream.read(copies, i), h, atol=1e-6)


def test_sinkhorn_gives_a_doubly_stochastic_matrix_whatever_the_size_of_the_logits():
    logits = jax.random.normal(jax.random.key(0), (50, 4, 4)) + jnp.array([-200.0, 0.0, 200.0])[:, None, None, None]
    found = np.asarray(sinkhorn(logits))
    np.testing.assert_allclose(found.sum(axis=-2), 1, atol=1e-6)
    np.testing.assert_allclose(found.sum(axis=-1), 1, atol=1e-3)
    assert np.all(found > 0)


def test_the_mixing_of_mhc_can_leave_the_identity():
    """Neither saturated nor, with equal streams, without effect: it has a gradient, and training moves it."""
    graph, parameters = nnx.split(model(ResidualConfig(kind="mhc")))

    def loss(parameters):
        found = nnx.merge(graph, parameters)(tokens())[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(found, tokens()[:, 1:]).mean()

    def mixing(parameters):
        update = nnx.merge(graph, parameters).stream.updates
        return np.asarray(sinkhorn(update.mixing_static[...]))

    optimizer = optax.adam(1e-2)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(parameters):
        def step(carry, _):
            parameters, state = carry
            gradient = jax.grad(loss)(parameters)
            updates, state = optimizer.update(gradient, state)
            return (optax.apply_updates(parameters, updates), state), gradient

        return jax.lax.scan(step, (parameters, optimizer.init(parameters)), None, length=10)

    (moved, _), gradients = run(parameters)
    first = jax.tree.map(lambda leaf: leaf[0], gradients).stream.updates
    sizes = {name: np.linalg.norm(first[name][...][1:-1]) for name in ("mixing_static", "output_static")}
    assert sizes["mixing_static"] > 0.01 * sizes["output_static"]
    distance = np.abs(mixing(moved) - mixing(parameters))[1:-1].max(axis=(1, 2))
    assert np.all(distance > 1e-3)
