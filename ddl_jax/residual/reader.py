"""Readers: the compressed view x (B, T, d) of the residual state (B, T, V, d) that a sublayer sees."""

from flax import nnx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ddl_jax.cache import Cache
from ddl_jax.config import ResidualConfig
from ddl_jax.parameters import normal, weight
from ddl_jax.residual.channels import read
from pallas_kernels import token_read
from pallas_kernels.layout import TokenAxes

State = Float[Array, "batch tokens channels width"]
Read = Float[Array, "batch tokens width"]


class IdentityReader(nnx.Module):
    """V = 1: the state's only channel."""

    def __init__(self, config: ResidualConfig, width: int, rngs: nnx.Rngs, token_axes: TokenAxes = None):
        pass

    def __call__(self, state: State, cache: Cache | None = None) -> Read:
        return state[:, :, 0]


class ChannelReader(nnx.Module):
    """CC: x_i = Σ_j a_ji X_ji, one weight per channel and feature.

    The `direct` form holds a (V, d). The `convolution` form, the official code's, holds a "same"-padded convolution
    over the channels, taps (K = V, d), and a read vector p (V): a_ji = Σ_u p_u taps_{j−u+(K−1)//2, i}, taps outside
    dropped.
    """

    def __init__(self, config: ResidualConfig, width: int, rngs: nnx.Rngs, token_axes: TokenAxes = None):
        V = config.value_channels
        mean = config.reader_initial == "mean"
        self.convolved = config.reader_form == "convolution"
        std = 0.5 / width**0.5
        if self.convolved:
            middle = jnp.zeros((V, width)).at[(V - 1) // 2].set(1.0)
            self.taps = weight(middle) if mean else normal(rngs, (V, width), std)
            self.pool = weight(jnp.full(V, 1 / V))
        else:
            self.mix = weight(jnp.full((V, width), 1 / V)) if mean else normal(rngs, (V, width), std)

    def weights(self) -> Float[Array, "channels width"]:
        """The effective a, in float32."""
        if not self.convolved:
            return self.mix[...]
        V = self.pool.shape[0]
        offset = jnp.arange(V)[:, None] - jnp.arange(V) + (V - 1) // 2  # of channel j (rows) for read position u
        inside = (offset >= 0) & (offset < V)
        kernel = jnp.where(inside[..., None], self.taps[...][offset.clip(0, V - 1)], 0.0)
        return jnp.einsum("u,jui->ji", self.pool[...], kernel, precision="highest")

    def __call__(self, state: State, cache: Cache | None = None) -> Read:
        return read(state, self.weights()).astype(state.dtype)


class TokenReader(nnx.Module):
    """TC: x_i[t] = Σ_j p_j Σ_s a_sji X_ji[t−s], a causal convolution over K tokens pooled over the channels."""

    def __init__(self, config: ResidualConfig, width: int, rngs: nnx.Rngs, token_axes: TokenAxes = None):
        self.kernel, self.token_axes = config.kernel, token_axes
        shape = (config.reader_taps, config.value_channels, width)
        if config.reader_initial == "mean":
            self.taps = weight(jnp.zeros(shape).at[0].set(1.0))
        else:
            self.taps = normal(rngs, shape, 0.5 / width**0.5)
        self.pool = weight(jnp.full(config.value_channels, 1 / config.value_channels))

    def __call__(self, state: State, cache: Cache | None = None) -> Read:
        weights = self.pool[...][:, None] * self.taps[...]
        if cache is not None:
            whole = cache.with_history(state, len(weights) - 1)
            return token_read(whole, weights, implementation=self.kernel)[:, -state.shape[1] :]
        return token_read(state, weights, implementation=self.kernel, token_axes=self.token_axes)


READERS = {"identity": IdentityReader, "channel": ChannelReader, "token": TokenReader}
