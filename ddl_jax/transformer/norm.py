"""RMSNorm with gain."""

from flax import nnx
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ddl_jax.parameters import gain

EPSILON = 1e-5  # inside the mean, as in the official code


class RMSNorm(nnx.Module):
    """y = g ⊙ x / sqrt(mean(x²) + 1e-5) over the last axis, computed in float32, returned as `dtype`."""

    def __init__(self, width: int, dtype: jnp.dtype):
        self.gain = gain(jnp.ones(width))
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        x = x.astype(jnp.float32)
        mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
        return (self.gain[...] * x * lax.rsqrt(mean_square + EPSILON)).astype(self.dtype)
