"""The token read of the residual state: the specification every implementation is compared with.

Shapes, with any leading axes: state X (…, T, V, d), weights a (K, V, d), read x (…, T, d).
"""

import jax.numpy as jnp

from pallas_kernels.precision import at_least_float32


def token_read(state, weights):
    """x_i[t] = Σ_s Σ_j a_sji X_ji[t−s],  s = 0..K−1, with zeros before the first token of each sequence."""
    X, a = at_least_float32(state), at_least_float32(weights)
    taps, tokens = a.shape[0], X.shape[-3]
    earlier = [(0, 0)] * (X.ndim - 3) + [(taps - 1, 0), (0, 0), (0, 0)]
    padded = jnp.pad(X, earlier)
    delayed = [padded[..., taps - 1 - s : taps - 1 - s + tokens, :, :] for s in range(taps)]
    return sum(jnp.sum(a[s] * delayed[s], axis=-2) for s in range(taps)).astype(state.dtype)
