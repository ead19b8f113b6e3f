"""Matrix products of features."""

import math

from flax import nnx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ddl_jax.partition import FSDP, TENSOR, divided_here, entering, gathered, leaving


def project(
    x: Float[Array, "*batch_and_inputs"],
    weight: Float[Array, "*inputs_and_outputs"] | nnx.Param,
    precision=None,
    *,
    inputs: int = 1,
) -> Float[Array, "*batch_and_outputs"]:
    """Σ_i x_i W_i in x's dtype, as one product of two matrices.

    The gradient of a product with several leading axes is up to 2.4 times slower on CPUs.

    Args:
        x: (*batch, *inputs).
        weight: (*inputs, *outputs). A parameter that a mesh divides (`ddl_jax.partition`) is gathered over `fsdp`;
            over `tensor`, outputs stay a device's own, and products over inputs are summed.
        precision: as of `jnp.matmul`.
        inputs: how many axes are summed over.
    """
    divided = divided_here(weight)
    part = weight[...] if isinstance(weight, nnx.Variable) else weight
    batch, outputs = x.shape[: x.ndim - inputs], list(part.shape[inputs:])
    if FSDP in divided and divided[FSDP] >= inputs:
        outputs[divided[FSDP] - inputs] *= jax.lax.axis_size(FSDP)

    def product(x, part):
        whole = gathered(part, divided[FSDP], x.dtype) if FSDP in divided else part.astype(x.dtype)
        return jnp.matmul(x, whole.reshape(x.shape[-1], -1), precision=precision)

    if FSDP in divided:
        # Backward gathers the weight again. Kept for it, the gathered weights of all layers would take the memory that
        # dividing them has saved.
        product = jax.checkpoint(product, prevent_cse=False)
    if TENSOR in divided and divided[TENSOR] >= inputs:
        x = entering(x)
    y = product(x.reshape(-1, math.prod(x.shape[len(batch) :])), part)
    if TENSOR in divided and divided[TENSOR] < inputs:
        y = leaving(y)
    return y.reshape(*batch, *outputs)
