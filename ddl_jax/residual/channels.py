"""The channel read, with one weight for each pair of channel and feature.

Its gradient is written out: left to autodiff, a sum over channels becomes padded arrays of the state's size.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ddl_jax.precision import at_least_float32
from pallas_kernels.rewrite.xla import over_channels

State = Float[Array, "batch tokens channels width"]
Features = Float[Array, "batch tokens width"]
Weights = Float[Array, "channels width"]


@jax.custom_vjp
def read(state: State, weights: Weights) -> Features:
    """x_i = Σ_j a_ji X_ji, in float32."""
    return over_channels(at_least_float32(weights), state)


def _backward(saved, d_read):
    """dX_ji = a_ji dx_i;  da_ji = Σ_tokens dx_i X_ji."""
    (state, weights), dx = saved, at_least_float32(d_read)[..., None, :]
    d_state = (at_least_float32(weights) * dx).astype(state.dtype)
    return d_state, jnp.sum(dx * at_least_float32(state), axis=(0, 1)).astype(weights.dtype)


read.defvjp(lambda state, weights: (read(state, weights), (state, weights)), _backward)
