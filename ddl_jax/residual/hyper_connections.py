"""Hyper-connections (Zhu et al., arXiv 2409.19606), static and dynamic.

    h₀ = A_mᵀ H,   H' = Bᵀ F(h₀)ᵀ + A_rᵀ H                                               (eq. 2 to 5)
    B   = s_β tanh(H̄ W_β)ᵀ + B⁰,   A_m = s_α tanh(H̄ W_m) + A_m⁰,                         (eq. 10 to 12)
    A_r = s_α tanh(H̄ W_r) + A_r⁰,   H̄ = norm(H), each stream by itself                   (eq. 10, 13)

Static ones are B⁰, A_m⁰ and A_r⁰ alone. They start at B⁰ = 1, A_m⁰ = e_(k mod n), with k counting the sublayers, and
A_r⁰ = I (eq. 14); W = 0 and s = 0.01. So all streams are equal to the plain residual state at first, and their sum is
n times it, which the last norm takes back. The paper also scales the output projections by √n at the start; here the
other parameters start as those of every other stream do. s_α stands in the reader and in the update, and each learns
its own; the norm is by the root mean square, without a gain, where the paper's module has a layer norm.
"""

from flax import nnx
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from ddl_jax.config import ResidualConfig
from ddl_jax.linear import project
from ddl_jax.parameters import bias, gain, weight
from ddl_jax.remat import PRODUCT
from ddl_jax.residual.mixing import Mixing, PerStream, State, StreamReader, StreamUpdate, unit_rms


def _products(state: State, weights):
    """H̄ W."""
    return checkpoint_name(project(unit_rms(state), weights, "highest"), PRODUCT)


class HyperReader(StreamReader):
    """A_m, and what its dynamic part is made from."""

    FINAL = 1.0  # A_m = 1: the sum over streams

    def __init__(self, config: ResidualConfig, width: int, rngs: nnx.Rngs, sublayer):
        n = config.value_channels
        self.static = bias(jnp.eye(n)[sublayer % n])
        self.weight = weight(jnp.zeros((width, 1))) if config.dynamic else None
        self.scale = gain(jnp.asarray(0.01)) if config.dynamic else None

    def weights(self, state: State) -> PerStream:
        """A_m (eq. 11)."""
        if self.weight is None:
            return self.static[...]
        return self.scale[...] * jnp.tanh(_products(state, self.weight)[..., 0]) + self.static[...]


class HyperUpdate(StreamUpdate):
    """B and A_r, and what their dynamic parts are made from."""

    def __init__(self, config: ResidualConfig, width: int, rngs: nnx.Rngs, sublayer):
        n = config.value_channels
        self.output_static = bias(jnp.ones(n))
        self.mixing_static = bias(jnp.eye(n))
        self.output_weight = weight(jnp.zeros((width, 1))) if config.dynamic else None
        self.mixing_weight = weight(jnp.zeros((width, n))) if config.dynamic else None
        self.output_scale = gain(jnp.asarray(0.01)) if config.dynamic else None
        self.mixing_scale = gain(jnp.asarray(0.01)) if config.dynamic else None

    def coefficients(self, state: State) -> tuple[PerStream, Mixing]:
        """B and A_rᵀ (eq. 10 and 13): row j of H̄ W is the part of stream j."""
        output, mixing = self.output_static[...], self.mixing_static[...]
        if self.output_weight is not None:
            weights = jnp.concatenate([self.output_weight[...], self.mixing_weight[...]], axis=1)
            products = jnp.tanh(_products(state, weights))
            output = self.output_scale[...] * products[..., 0] + output
            mixing = self.mixing_scale[...] * products[..., 1:] + mixing
        return output, jnp.swapaxes(mixing, -1, -2)
