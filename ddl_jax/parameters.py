"""The roles a parameter can have. The role, never the number of dimensions, decides what the optimiser does with it."""

from flax import nnx
import jax
import jax.numpy as jnp


def weight(value: jax.Array) -> nnx.Param:
    """A matrix, embedding, convolution or reader: has weight decay."""
    return nnx.Param(value, role="weight")


def gain(value: jax.Array) -> nnx.Param:
    """The gain of a norm: no weight decay."""
    return nnx.Param(value, role="gain")


def bias(value: jax.Array) -> nnx.Param:
    """A bias: no weight decay."""
    return nnx.Param(value, role="bias")


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float) -> nnx.Param:
    """A weight drawn from N(0, std²), float32."""
    return weight(std * jax.random.normal(rngs.params(), shape, jnp.float32))


def stacked(make, count: int, rngs: nnx.Rngs):
    """`count` modules made by `make(rngs)`, as one module whose parameters have a leading axis of that length."""
    make_all = nnx.vmap(make, in_axes=0, out_axes=0)
    return nnx.split_rngs(splits=count)(make_all)(rngs)


def at(module, index):
    """The module at `index` (an integer, a slice or an array of integers) of a stack."""
    return jax.tree.map(lambda parameter: parameter[index], module)
