"""How a model is divided over a mesh: which axis of a parameter over which mesh axis, and what is then exchanged.

The training step runs inside one `jax.shard_map` over the whole mesh: a device has its own sequences (over `data` and
`fsdp`), its slice of each divided parameter, and what it exchanges is written out here, so that there is nothing for a
compiler to guess. Over `fsdp` a weight is gathered when a product needs it, and its gradient summed and scattered; over
`tensor` each device computes its heads and hidden features, and their contributions are summed. Outside of such a
`shard_map` the functions below change nothing.
"""

from collections.abc import Callable
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from ddl_jax.precision import at_least_float32

DATA, FSDP, TENSOR = MESH_AXES = ("data", "fsdp", "tensor")
BATCH_AXES = (DATA, FSDP)  # the mesh axes that divide the sequences of a batch

# The mesh axis that divides each named axis of a parameter (`ddl_jax.parameters`). What has no name is whole on every
# device: gains, biases, readers, gates, values and what mixes streams, together about a hundredth of the parameters;
# and the vocabulary, so that any size will do.
OVER = {"width": FSDP, "heads": TENSOR, "hidden": TENSOR}


def spec(parameter: nnx.Param) -> PartitionSpec:
    """The mesh axis that divides each axis of a parameter. Its last axes are those named; a stack's first is whole."""
    stacked = parameter.ndim - len(parameter.axes)
    return PartitionSpec(*[None] * stacked, *(OVER[name] if name else None for name in parameter.axes))


def specs(tree: Any) -> Any:
    """`spec` of each parameter in a tree, and of what belongs to one, such as its moments; the rest is whole."""

    def of(leaf):
        return leaf.replace(spec(leaf)) if isinstance(leaf, nnx.Variable) else PartitionSpec()

    return jax.tree.map(of, tree, is_leaf=lambda node: isinstance(node, nnx.Variable))


def shardings(tree: Any, mesh: Mesh) -> Any:
    """`specs` on a mesh."""
    return jax.tree.map(lambda each: NamedSharding(mesh, each), specs(tree))


def placed(tree: Any, mesh: Mesh | None) -> Any:
    """The arrays of a traced tree, held to where `specs` has them."""
    if mesh is None or mesh.size == 1:
        return tree
    return jax.lax.with_sharding_constraint(tree, shardings(tree, mesh))


def divided_here(parameter: nnx.Param | Array) -> dict[str, int]:
    """The mesh axes over which this is a device's slice of a parameter, each with the axis of the array it divides."""
    if not isinstance(parameter, nnx.Variable):
        return {}
    return {name: axis for axis, name in enumerate(spec(parameter)) if name and _here(name)}


def _here(name: str) -> bool:
    """Whether this is traced for one device out of several along the mesh axis."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return name in kinds and kinds[name] == AxisType.Manual and mesh.shape[name] > 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gathered(part: Array, axis: int, dtype: jnp.dtype) -> Array:
    """The whole of a parameter that `fsdp` divides along `axis`, sent in `dtype`; gradients are summed in float32."""
    return jax.lax.all_gather(part.astype(dtype), FSDP, axis=axis, tiled=True)


def _scattered(axis, dtype, saved, d_whole):
    return (jax.lax.psum_scatter(at_least_float32(d_whole), FSDP, scatter_dimension=axis, tiled=True),)


gathered.defvjp(lambda part, axis, dtype: (gathered(part, axis, dtype), None), _scattered)


def gathered_once(parameters: nnx.State) -> nnx.State:
    """The parameters with those gathered that are no stack of layers: the embedding. Layers follow in their turn."""

    def of(parameter):
        divided = divided_here(parameter)
        if FSDP not in divided or parameter.ndim > len(parameter.axes):
            return parameter
        return parameter.replace(gathered(parameter[...], divided[FSDP], parameter.dtype))

    return jax.tree.map(of, parameters, is_leaf=lambda node: isinstance(node, nnx.Variable))


def entering(x: Array) -> Array:
    """x, from which each device along `tensor` goes on to make its own part: the gradients of the parts add up."""
    return _entering(x) if _here(TENSOR) else x


def leaving(x: Array) -> Array:
    """The sum of x over `tensor`, the same on each of its devices from here on."""
    return _leaving(x) if _here(TENSOR) else x


# Each is the other's transpose, which autodiff cannot know: it takes what is the same on all devices for their own.
_entering = jax.custom_vjp(lambda x: x)
_leaving = jax.custom_vjp(lambda x: jax.lax.psum(x, TENSOR))
_entering.defvjp(lambda x: (x, None), lambda _, d_x: (jax.lax.psum(d_x, TENSOR),))
_leaving.defvjp(lambda x: (jax.lax.psum(x, TENSOR), None), lambda _, d_x: (d_x,))


def on_each_device(function: Callable, mesh: Mesh | None, *, gradient: bool) -> Callable:
    """A function (parameters, batch) → sums over the batch, run by each device on what it has of both.

    Args:
        function: of whole parameters and a batch of any number of sequences.
        mesh: the devices; None, or one device, changes nothing.
        gradient: whether the function returns a sum and a gradient, a tree like the parameters, or the sum alone.

    Returns:
        The same function of parameters and a batch that are placed on the mesh. What the devices come to is summed.
    """
    if mesh is None or mesh.size == 1:
        return function

    def summed(leaf):
        divided = divided_here(leaf) if isinstance(leaf, nnx.Variable) else {}
        axes = tuple(
            name for name in BATCH_AXES if _here(name) and name not in divided
        )  # over fsdp it is summed already
        return jax.tree.map(lambda array: jax.lax.psum(array, axes), leaf)

    def part(parameters, batch):
        return jax.tree.map(summed, function(parameters, batch), is_leaf=lambda node: isinstance(node, nnx.Variable))

    def whole(parameters, batch):
        here, total = specs(parameters), PartitionSpec()
        return jax.shard_map(
            part,
            mesh=mesh,
            in_specs=(here, PartitionSpec(BATCH_AXES)),
            out_specs=(total, here) if gradient else total,
            check_vma=False,  # a kernel does not say over which axes its outputs vary
        )(parameters, batch)

    return whole
