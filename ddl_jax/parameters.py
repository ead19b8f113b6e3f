"""How parameters are made: each with the role that it has and the names of the axes that a mesh may divide.

The role, never the number of dimensions, decides what the optimiser does with a parameter. `axes` names its last axes:
those that `ddl_jax.partition` knows are divided over a mesh, None is whole. A stack of layers has one more in front.
"""

from flax import nnx
import jax
import jax.numpy as jnp

Axes = tuple[str | None, ...]


def weight(value: jax.Array, axes: Axes = ()) -> nnx.Param:
    """A matrix, embedding, convolution or reader: has weight decay."""
    return nnx.Param(value, role="weight", axes=axes)


def gain(value: jax.Array) -> nnx.Param:
    """The gain of a norm, or a scale in front: no weight decay."""
    return nnx.Param(value, role="gain", axes=())


def bias(value: jax.Array) -> nnx.Param:
    """A bias: no weight decay."""
    return nnx.Param(value, role="bias", axes=())


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float, axes: Axes = ()) -> nnx.Param:
    """A weight drawn from N(0, std²), float32."""
    return weight(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes)


def stacked(make, count: int, rngs: nnx.Rngs):
    """`count` modules made by `make(rngs)`, as one module whose parameters have a leading axis of that length."""
    make_all = nnx.vmap(make, in_axes=0, out_axes=0)
    return nnx.split_rngs(splits=count)(make_all)(rngs)


def numbered(make, count: int, rngs: nnx.Rngs):
    """As `stacked`, of modules made by `make(rngs, number)` with the numbers from 0."""
    make_all = nnx.vmap(make, in_axes=(0, 0), out_axes=0)
    return nnx.split_rngs(splits=count)(make_all)(rngs, jnp.arange(count))


def at(module, index):
    """The module at `index` (an integer, a slice or an array of integers) of a stack."""
    return jax.tree.map(lambda parameter: parameter[index], module)
