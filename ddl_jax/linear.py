"""Matrix products of features."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def project(x: Float[Array, "*batch inputs"], weight: Float[Array, "inputs *outputs"], precision=None) -> Array:
    """Σ_i x_i W_i of shape (*batch, *outputs), in x's dtype, as one product of two matrices.

    The gradient of a product with several leading axes is up to 2.4 times slower on CPUs.
    """
    flat = x.reshape(-1, x.shape[-1])
    matrix = weight.astype(x.dtype).reshape(x.shape[-1], -1)
    return jnp.matmul(flat, matrix, precision=precision).reshape(*x.shape[:-1], *weight.shape[1:])
