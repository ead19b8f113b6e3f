"""Manifold-constrained hyper-connections (Xie et al., arXiv 2512.24880).

    x̃ = RMSNorm(vec(H)),   m̃ = α (x̃ φ) + b for each of pre, post and res                 (eq. 7)
    m_pre = σ(m̃_pre),   m_post = 2σ(m̃_post),   M_res = Sinkhorn–Knopp(exp(m̃_res))        (eq. 8)
    Sinkhorn–Knopp: 20 times, each row over its sum, then each column over its sum        (eq. 9)

M_res is doubly stochastic: it mixes streams and keeps their mean. The columns come last, so that the mean is kept to
rounding; rows sum to 1 as closely as 20 rounds bring them. All in float32.

The paper starts with α = 0.01 and leaves b open. Here φ = 0, and b is such that the mean over streams is a plain
residual: entries of m_pre sum to 1, those of m_post to n. They are not equal, however. With equal ones all streams stay
equal, every M_res does the same to them, and its gradient is 0: it would never move. So sublayer k reads more of stream
k mod n, and writes more into it: m_pre = 1/n + t, m_post = 1 + t, with t = (e_(k mod n) − 1/n) / 2. For the same reason
M_res is only close to the identity, 0.9 on its diagonal: Sinkhorn's gradient goes to 0 with what is off it.
The last M_res, before the sum over streams, changes nothing whatever it is; the first, of copies, only as far as 20
rounds leave its rows short of 1.
"""

import math

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jaxtyping import Array, Float

from ddl_jax.config import ResidualConfig
from ddl_jax.linear import project
from ddl_jax.parameters import bias, gain, weight
from ddl_jax.remat import PRODUCT
from ddl_jax.residual.mixing import Mixing, PerStream, State, StreamReader, StreamUpdate, unit_rms

ROUNDS = 20  # of Sinkhorn and Knopp
SCALE = 0.01  # α at the start
KEPT = 0.9  # the diagonal of M_res at the start


def _products(state: State, weights):
    """x̃ φ (eq. 7)."""
    vector = state.reshape(*state.shape[:-2], -1)
    return checkpoint_name(project(unit_rms(vector), weights, "highest"), PRODUCT)


def _logit(share):
    return jnp.log(share / (1 - share))


def _tilt(n: int, sublayer) -> Float[Array, " channels"]:
    """What the sublayer's own stream has more than others, and they less; sums to 0."""
    return (jnp.eye(n)[sublayer % n] - 1 / n) / 2


@jax.checkpoint  # backward keeps the logits, not 40 matrices for each token
def sinkhorn(logits: Float[Array, "*batch rows columns"]) -> Float[Array, "*batch rows columns"]:
    """exp(logits) with rows and columns divided by their sums in turn: close to doubly stochastic (eq. 9)."""

    def normalised(_, matrix):
        matrix = matrix / jnp.sum(matrix, axis=-1, keepdims=True)
        return matrix / jnp.sum(matrix, axis=-2, keepdims=True)

    largest = jax.lax.stop_gradient(jnp.max(logits, axis=(-2, -1), keepdims=True))  # a factor, which cancels
    return jax.lax.fori_loop(0, ROUNDS, normalised, jnp.exp(logits - largest))


class ManifoldReader(StreamReader):
    """m_pre."""

    FINAL = 40.0  # σ is 1 to the last bit, also in float64: the sum over streams

    def __init__(self, config: ResidualConfig, width: int, rngs: nnx.Rngs, sublayer):
        n = config.value_channels
        self.weight = weight(jnp.zeros((n * width, n)))
        self.scale = gain(jnp.asarray(SCALE))
        self.static = bias(_logit(1 / n + _tilt(n, sublayer)))

    def weights(self, state: State) -> PerStream:
        """m_pre = σ(m̃_pre) (eq. 8)."""
        return jax.nn.sigmoid(self.scale[...] * _products(state, self.weight) + self.static[...])


class ManifoldUpdate(StreamUpdate):
    """m_post and M_res."""

    def __init__(self, config: ResidualConfig, width: int, rngs: nnx.Rngs, sublayer):
        n = config.value_channels
        self.output_weight = weight(jnp.zeros((n * width, n)))
        self.output_scale = gain(jnp.asarray(SCALE))
        self.output_static = bias(_logit((1 + _tilt(n, sublayer)) / 2))
        self.mixing_weight = weight(jnp.zeros((n * width, n * n)))
        self.mixing_scale = gain(jnp.asarray(SCALE))
        self.mixing_static = bias(math.log(KEPT / (1 - KEPT) * (n - 1)) * jnp.eye(n))

    def coefficients(self, state: State) -> tuple[PerStream, Mixing]:
        """m_post = 2σ(m̃_post), and M_res (eq. 8)."""
        n = self.output_static.shape[-1]
        weights = jnp.concatenate([self.output_weight[...], self.mixing_weight[...]], axis=1)
        products = _products(state, weights)
        output = 2 * jax.nn.sigmoid(self.output_scale[...] * products[..., :n] + self.output_static[...])
        mixing = products[..., n:].reshape(*products.shape[:-1], n, n)
        return output, sinkhorn(self.mixing_scale[...] * mixing + self.mixing_static[...])
