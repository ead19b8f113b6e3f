"""Between channels and features, with one weight for each pair: `read` and `spread`, each other's transpose.

Their gradients are written out: left to autodiff, sums over channels become padded arrays of the state's size.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.rewrite.xla import over_channels

State = Float[Array, "batch tokens channels width"]
Features = Float[Array, "batch tokens width"]
Weights = Float[Array, "channels width"]
F32 = jnp.float32


@jax.custom_vjp
def read(state: State, weights: Weights) -> Features:
    """x_i = Σ_j a_ji X_ji, in float32."""
    return over_channels(weights.astype(F32), state)


@jax.custom_vjp
def spread(features: Features, weights: Weights) -> State:
    """X_ji = a_ji e_i, in float32."""
    return weights.astype(F32) * features.astype(F32)[..., None, :]


def _over_tokens(features: Features, state: State) -> Weights:
    return jnp.sum(features.astype(F32)[..., None, :] * state.astype(F32), axis=(0, 1))


def _read_backward(saved, d_read):
    state, weights = saved
    return spread(d_read, weights).astype(state.dtype), _over_tokens(d_read, state).astype(weights.dtype)


def _spread_backward(saved, d_state):
    features, weights = saved
    d_features = over_channels(weights.astype(F32), d_state).astype(features.dtype)
    return d_features, _over_tokens(features, d_state).astype(weights.dtype)


read.defvjp(lambda state, weights: (read(state, weights), (state, weights)), _read_backward)
spread.defvjp(lambda features, weights: (spread(features, weights), (features, weights)), _spread_backward)
