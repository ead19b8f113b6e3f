"""The precision in which operations on the state compute."""

import jax
import jax.numpy as jnp


def at_least_float32(x: jax.Array) -> jax.Array:
    """x in float32, or as it is where it is wider: float64, under `jax_enable_x64`."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
