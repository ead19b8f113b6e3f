"""How a mesh divides the tokens of an operation, and what an operation does about it.

Under plain `jit`, XLA gathers all operands of a kernel on every device, without a word. So a kernel runs inside of
`jax.shard_map`, which has to be told how tokens are divided: the arrays' types know where mesh axes are Explicit, the
caller (`token_axes`) where they are Auto, and where an enclosing `shard_map` made them Manual it is done already. The
mesh itself is the context's (`jax.set_mesh`) or that of the arrays. One that only `jit(in_shardings=…)` names is not to
be seen from inside.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

# The mesh axes that divide the first token axis (the batch), or a PartitionSpec of those that divide each.
TokenAxes = str | Sequence[str] | PartitionSpec | None


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the tokens of one call are.

    Attributes:
        spec: the mesh axes that divide each token axis; None where there is nothing to divide (any more).
        mesh: theirs, empty where there is none.
        in_context: the mesh is the context's.
        varying: in a `shard_map` with `check_vma`, the mesh axes over which the arrays vary.
    """

    spec: PartitionSpec | None
    mesh: AbstractMesh
    in_context: bool
    varying: frozenset[str]

    @property
    def names(self) -> tuple[str, ...]:
        """The mesh axes that divide tokens."""
        return tuple(name for entry in self.spec or () for name in _names(entry))

    @property
    def typed(self) -> bool:
        """Whether types say how an array is divided, so that XLA asks how each product is to be."""
        return bool(self.names) and AxisType.Explicit in self.mesh.axis_types

    @property
    def devices(self) -> int:
        """How many the mesh has."""
        return math.prod(self.mesh.shape.values())

    @property
    def platform(self) -> str:
        """Of the devices that are compiled for, as far as can be seen."""
        # A mesh knows it, also one of devices that are not here.
        device = self.mesh.abstract_device
        return jax.default_backend() if device is None else device.platform

    def place(self, array: jax.Array, shared: bool = False) -> jax.Array:
        """An argument as `divide` takes it."""
        explicit = _axes(self.mesh, AxisType.Explicit)
        if explicit and self.spec is not None:
            entries = [tuple(n for n in _names(entry) if n in explicit) or None for entry in self.spec]
            spec = PartitionSpec() if shared else PartitionSpec(*entries)
            array = jax.sharding.reshard(array, NamedSharding(self.mesh, spec))
        return self._own(array)

    def divide(self, function: Callable, tokens: int) -> Callable:
        """`function` of arrays, the first `tokens` of which have token axes, run on each device's part of the tokens.

        It returns a tuple of arrays with token axes, and a tuple of sums over its tokens, which are summed on over the
        devices, once.
        """

        def part(*arguments):
            outputs, sums = function(*arguments)
            return outputs, jax.lax.psum(sums, self.names) if self.names else sums

        def whole(*arguments):
            shared = PartitionSpec()
            divided = jax.shard_map(
                part,
                mesh=None if self.in_context else self.mesh,
                in_specs=(self.spec,) * tokens + (shared,) * (len(arguments) - tokens),
                out_specs=(self.spec, shared),
                axis_names=_axes(self.mesh, AxisType.Explicit, AxisType.Auto),
                check_vma=False,  # a kernel does not say over which axes its outputs vary
            )
            return divided(*arguments)

        run = function if self.spec is None else whole
        return lambda *arguments: jax.tree.map(self._own, run(*arguments))

    def _own(self, array: jax.Array) -> jax.Array:
        # What is shared becomes each device's own; the transpose sums its gradients.
        missing = self.varying - jax.typeof(array).manual_axis_type.varying
        return jax.lax.pcast(array, tuple(missing), to="varying") if missing else array


def layout(
    tokens: Mapping[str, jax.Array], shared: Mapping[str, jax.Array], whole: Sequence[str], token_axes: TokenAxes
) -> tuple[Layout, str | None]:
    """The layout of the arguments of a call.

    Args:
        tokens: by name, the arrays with token axes; the state first.
        shared: by name, those without.
        whole: the names of the state's last axes, which no device may hold only a part of.
        token_axes: see `TokenAxes`. Axes that are not Auto are skipped.

    Returns:
        The layout, and why a kernel cannot follow it, if it cannot.

    Raises:
        ValueError: Explicit axes divide what has to be whole, or differ; an axis of `token_axes` is not the mesh's.
    """
    types = {name: jax.typeof(array) for name, array in (*tokens.items(), *shared.items())}
    # Without a mesh in the context, arrays that were put on one still carry it, also under jit.
    context = jax.sharding.get_abstract_mesh()
    mesh = next((m for m in (context, *(t.sharding.mesh for t in types.values())) if not m.empty), context)
    shape = next(iter(types.values())).shape
    shape = shape[: len(shape) - len(whole)]
    spec, problem = None, None
    if _axes(mesh, AxisType.Explicit) or any(mesh.shape[name] > 1 for name in _axes(mesh, AxisType.Auto)):
        typed = _typed({name: types[name].sharding.spec for name in tokens}, len(shape), whole)
        spec, problem = _division(shape, typed, mesh, token_axes)
    elif mesh.empty and token_axes is not None and jax.device_count() > 1:
        problem = "token_axes is given, but no mesh is in sight; call under jax.set_mesh(mesh)"
    varying = frozenset().union(*(t.manual_axis_type.varying for t in types.values()))
    return Layout(spec, mesh, not context.empty, varying), problem


def _typed(specs: Mapping[str, PartitionSpec], leading: int, whole: Sequence[str]) -> list[tuple[str, ...]]:
    """The Explicit mesh axes that divide each token axis. An array that none divides follows those that some do."""
    found = {}
    for name, spec in specs.items():
        entries = [_names(entry) for entry in spec]
        if any(entries[leading:]):
            raise ValueError(
                f"{name} is sharded as {spec}, but only its first {leading} axes may be: a device needs the whole "
                f"{' and '.join(whole)} of its tokens"
            )
        if any(entries):
            found[name] = entries
    for name, entries in found.items():
        first = next(iter(found))
        if entries[:leading] != found[first][:leading]:
            raise ValueError(f"{name} is sharded as {specs[name]}, but {first} as {specs[first]}")
    return next(iter(found.values()), [()] * leading)[:leading]


def _division(shape, typed, mesh: AbstractMesh, token_axes: TokenAxes) -> tuple[PartitionSpec | None, str | None]:
    """The mesh axes that divide each token axis, or None and why they cannot be used."""
    auto = _axes(mesh, AxisType.Auto)
    per_axis = token_axes if isinstance(token_axes, PartitionSpec) else (token_axes,)
    given = [_names(entry) for entry in per_axis]
    unknown = [name for names in given for name in names if name not in mesh.shape]
    if unknown:
        raise ValueError(f"token_axes names {unknown[0]!r}, but the mesh has {', '.join(mesh.axis_names)}")
    if token_axes is None and any(mesh.shape[name] > 1 for name in auto):
        sizes = ", ".join(f"{name}={mesh.shape[name]}" for name in mesh.axis_names if name in auto)
        return None, (
            f"how the Auto axes of the mesh ({sizes}) divide the tokens is not known; pass token_axes, the names of "
            "those that divide the batch, or make them Explicit"
        )
    if any(given[len(shape) :]):
        return None, f"token_axes {token_axes} divides more than the first {len(shape)} axes"
    if _mapped_over_explicit(mesh):
        return None, "an enclosing vmap maps over an Explicit mesh axis; pass what it maps over as a leading axis"
    spec = list(typed)
    for i, names in enumerate(given[: len(shape)]):
        names = tuple(name for name in names if name in auto)
        parts = math.prod(mesh.shape[name] for name in names)
        if shape[i] % parts:
            return None, f"axis {i} of the state has length {shape[i]}, not a multiple of {parts} ({', '.join(names)})"
        spec[i] += names
    return PartitionSpec(*(names or None for names in spec)), None


def _mapped_over_explicit(mesh: AbstractMesh) -> bool:
    """Whether `vmap` maps over an Explicit mesh axis, which then no shard_map may divide. The types do not show it."""
    explicit, everywhere = _axes(mesh, AxisType.Explicit), PartitionSpec()
    if not explicit:
        return False
    try:
        probe = jax.shard_map(
            lambda x: x, mesh=mesh, in_specs=everywhere, out_specs=everywhere, axis_names=explicit, check_vma=False
        )
        jax.eval_shape(probe, jax.ShapeDtypeStruct((), "float32"))
    except ValueError:
        return True
    return False


def _axes(mesh: AbstractMesh, *kinds: AxisType) -> frozenset[str]:
    return frozenset(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind in kinds)


def _names(entry: Any) -> tuple[str, ...]:
    """The mesh axes in one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
