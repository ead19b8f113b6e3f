"""RMSNorm with gain."""

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ddl_jax.parameters import gain
from ddl_jax.precision import at_least_float32

EPSILON = 1e-5  # inside the mean, as in the official code


class RMSNorm(nnx.Module):
    """y = g ⊙ x / sqrt(mean(x²) + 1e-5) over the last axis, computed in float32, returned as `dtype`."""

    def __init__(self, width: int, dtype: jnp.dtype):
        self.gain = gain(jnp.ones(width))
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        return _normalize(x, self.gain[...]).astype(self.dtype)


@jax.custom_vjp
def _normalize(x, gain):
    return gain * _unit(x)[0]


def _unit(x):
    """x̂ = r x and r = 1 / sqrt(mean(x²) + 1e-5), in float32."""
    x = at_least_float32(x)
    r = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPSILON)
    return r * x, r


def _backward(saved, dy):
    """dx = r (g ⊙ dy − x̂ mean(g ⊙ dy ⊙ x̂)), dg = Σ dy ⊙ x̂.

    Written out to keep x as it came, and not float32 copies of it.
    """
    x, gain = saved
    unit, r = _unit(x)
    along = jnp.mean(gain * dy * unit, axis=-1, keepdims=True)
    d_gain = jnp.sum(dy * unit, axis=tuple(range(x.ndim - 1)))
    return (r * (gain * dy - unit * along)).astype(x.dtype), d_gain.astype(gain.dtype)


_normalize.defvjp(lambda x, gain: (_normalize(x, gain), (x, gain)), _backward)
