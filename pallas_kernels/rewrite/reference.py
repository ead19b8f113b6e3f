"""The rewrite of the residual state: the specification every implementation is compared with.

Shapes, with any leading axes: state X (…, V, d), branch h (…, d), value v (…, V), gate β (…), weights a (V, d).
"""

from jax import lax
import jax.numpy as jnp

from pallas_kernels.precision import at_least_float32


def rewrite(state, branch, value, gate, *, epsilon=1e-5, erase=True):
    """X' = X + β k wᵀ  with  k = h / sqrt(‖h‖² + ε²)  and  w = v − kᵀX  (w = v without erase). Paper eq. 2.2."""
    X, h, v, β = map(at_least_float32, (state, branch, value, gate))
    k = h * lax.rsqrt(jnp.sum(h * h, axis=-1, keepdims=True) + epsilon**2)
    w = v - jnp.sum(k[..., None, :] * X, axis=-1) if erase else v
    return (X + (β[..., None] * w)[..., None] * k[..., None, :]).astype(state.dtype)


def rewrite_and_read(state, branch, value, gate, weights, *, epsilon=1e-5, erase=True):
    """The rewrite, and what the next channel reader sees of X' (before it is rounded): x_i = Σ_j a_ji X'_ji."""
    exact = rewrite(at_least_float32(state), branch, value, gate, epsilon=epsilon, erase=erase)
    read = jnp.sum(at_least_float32(weights) * exact, axis=-2)
    return exact.astype(state.dtype), read.astype(state.dtype)
