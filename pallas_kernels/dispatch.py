"""Between the public operations and their implementations: which one runs, and on which part of the tokens.

An operation takes arrays that begin with token axes (`tokens`: the state, the branch, …) and arrays that all tokens
share (`shared`: weights). It returns arrays that begin with token axes, and sums over all tokens (the gradients of what
is shared). `plan` settles, when the operation is called, what may run and how a mesh divides the tokens; `Plan.run`
runs it, in forward and again in backward, from inside `custom_vjp`.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import logging
import math
from typing import Any, Literal, get_args

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

Implementation = Literal["auto", "xla", "pallas"]
# The mesh axes that divide the first token axis (the batch), or those of each token axis.
TokenAxes = str | Sequence[str] | PartitionSpec | None
Arrays = tuple[jax.Array, ...]

_log = logging.getLogger(__name__)


def explain(
    implementation: Implementation, unsupported: str | None = None, devices: Sequence[jax.Device] | None = None
) -> str:
    """What `implementation` comes to, for a start-up line.

    Args:
        implementation: as given to the operations.
        unsupported: why the kernel cannot take the arrays, where it cannot.
        devices: those compiled for; the local ones by default.

    Returns:
        Such as "Pallas (Hopper)", "XLA" or "XLA: width 72 is not a multiple of 128".

    Raises:
        ValueError: an unknown implementation, or `pallas` where the kernel cannot run.
    """
    _known(implementation)
    if implementation == "xla":
        return "XLA"
    device = (jax.local_devices() if devices is None else devices)[0]
    interpreted = implementation == "pallas" and device.platform == "cpu"
    reason = unsupported or (None if interpreted else _not_hopper(device))
    if implementation == "pallas" and reason is not None:
        raise ValueError(reason)
    if reason is not None:
        return f"XLA: {reason}"
    return "Pallas (interpreted)" if interpreted else "Pallas (Hopper)"


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one call of an operation runs. Hashable: `custom_vjp` takes it as a static argument.

    Attributes:
        implementation: `auto` is decided when the program is lowered, by the devices it is lowered for.
        interpret: the kernel runs in Pallas' interpreter.
        leading: how many token axes are independent of each other; the kernel sees them as one.
        spec: the mesh axes that divide each of them; None where nothing is to be divided (any more).
        axes: the mesh axes that can divide.
        typed: some of those are Explicit.
        mesh: theirs; None is the mesh of the context.
    """

    implementation: Implementation
    interpret: bool
    leading: int
    spec: PartitionSpec | None
    axes: frozenset[str]
    typed: bool
    mesh: AbstractMesh | None

    def run(self, pallas: Callable, xla: Callable, tokens: Arrays, shared: Arrays = ()) -> tuple[Arrays, Arrays]:
        """Runs one of two functions of the same arrays.

        Args:
            pallas: called as `pallas(*tokens, *shared, interpret=…)` on one device's part of the tokens, with their
                `leading` axes made one. Called only to trace the kernel, so that it may import what it needs.
            xla: called as `xla(*tokens, *shared)`.
            tokens: the arrays with token axes.
            shared: those without.

        Returns:
            Two tuples, as both functions return them: arrays with token axes, and sums over all tokens.
        """

        def kernel(*arguments):
            shape = arguments[0].shape[: self.leading]
            parts = [a.reshape(math.prod(shape), *a.shape[self.leading :]) for a in arguments[: len(tokens)]]
            outputs, sums = pallas(
                *parts, *arguments[len(tokens) :], interpret=_interpreter() if self.interpret else None
            )
            return tuple(a.reshape(*shape, *a.shape[1:]) for a in outputs), sums

        def divided(function):
            names = [name for entry in self.spec for name in _names(entry)]

            def part(*arguments):
                outputs, sums = function(*arguments)
                return outputs, jax.lax.psum(sums, names) if names else sums

            # Outside of shard_map a kernel's operands are gathered on every device, silently. With check_vma, JAX would
            # want the kernel to declare over which axes its outputs vary.
            return jax.shard_map(
                part,
                mesh=self.mesh,
                in_specs=(self.spec,) * len(tokens) + (PartitionSpec(),) * len(shared),
                out_specs=(self.spec, PartitionSpec()),
                axis_names=self.axes,
                check_vma=False,
            )

        if self.spec is not None:
            # XLA divides its own work, except where axes are Explicit: there each product would need to be told how.
            kernel, xla = divided(kernel), divided(xla) if self.typed else xla
        if self.implementation == "auto":
            return jax.lax.platform_dependent(*tokens, *shared, cuda=kernel, default=xla)
        return (kernel if self.implementation == "pallas" else xla)(*tokens, *shared)


def plan(
    operation: str,
    implementation: Implementation,
    token_axes: TokenAxes,
    tokens: Mapping[str, jax.Array],
    shared: Mapping[str, jax.Array],
    whole: Sequence[str],
    unsupported: str | None,
) -> tuple[Plan, Arrays, Arrays]:
    """Decides how a call of an operation runs.

    Args:
        operation: its name, for messages.
        implementation: `auto`, `xla` or `pallas`.
        token_axes: the mesh axes that divide the first token axis, or a PartitionSpec of those that divide each.
            Needed where axes are Auto, as the arrays' types then say nothing. Axes that an enclosing `shard_map` has
            made Manual have divided the tokens already and are skipped; without a mesh all are.
        tokens: by name, the arrays with token axes; the state first.
        shared: by name, those without.
        whole: names of the state's last axes, those of which no device may hold a part only: ("channels", "width"),
            and before them "tokens" for an operation that looks at other tokens.
        unsupported: why the kernel cannot take these arrays, where it cannot.

    Returns:
        The plan, then `tokens` and `shared` laid out as it takes them.

    Raises:
        ValueError: an unknown implementation; axes that the mesh does not have; `pallas` where the kernel cannot run or
            its tokens cannot be divided (`auto` runs XLA then, and says why once); Explicit axes that divide what has
            to be whole, with any implementation.
    """
    _known(implementation)
    types = {name: jax.typeof(array) for name, array in (*tokens.items(), *shared.items())}
    context = jax.sharding.get_abstract_mesh()
    mesh = next((m for m in (context, *(t.sharding.mesh for t in types.values())) if not m.empty), context)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = frozenset(name for name, kind in kinds.items() if kind == AxisType.Explicit)
    auto = frozenset(name for name, kind in kinds.items() if kind == AxisType.Auto)
    state = next(iter(types.values()))
    leading = state.ndim - len(whole)
    for name in tokens if explicit else ():
        if any(types[name].sharding.spec[leading:]):
            raise ValueError(
                f"{operation}: {name} is sharded as {types[name].sharding.spec}, but only its first {leading} axes may "
                f"be: each device needs all {' and '.join(whole)} of its tokens"
            )
    spec, problem = None, None
    if explicit or any(mesh.shape[name] > 1 for name in auto):
        spec, problem = _division(state, leading, mesh, auto, token_axes)

    # A mesh knows what its devices are: what is compiled ahead of time for GPUs is not interpreted on this CPU.
    device = mesh.abstract_device
    platform = jax.default_backend() if device is None else device.platform
    reason = unsupported or problem
    if reason is None and jax.default_backend() == "gpu":
        reason = _not_hopper(jax.local_devices()[0])
    if reason is not None and implementation == "pallas":
        raise ValueError(f"{operation}: {reason}")
    if reason is not None and implementation == "auto":
        # Where there is no GPU it would have been XLA anyway.
        _say(logging.INFO if platform == "cpu" else logging.WARNING, f"{operation} runs on XLA: {reason}")
        implementation = "xla"

    def placed(name, array, axes=()):
        if explicit:
            axes = [tuple(n for n in _names(entry) if n in explicit) or None for entry in axes]
            array = jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec(*axes)))
        # In a shard_map with check_vma, what is shared becomes each device's own; the transpose sums the gradients.
        others = varying - types[name].manual_axis_type.varying
        return jax.lax.pcast(array, tuple(others), to="varying") if others else array

    varying = frozenset().union(*(t.manual_axis_type.varying for t in types.values()))
    return (
        Plan(
            implementation=implementation,
            interpret=platform == "cpu",
            leading=leading,
            spec=spec,
            axes=explicit | auto,
            typed=bool(explicit),
            mesh=mesh if context.empty else None,
        ),
        tuple(placed(name, array, spec or ()) for name, array in tokens.items()),
        tuple(placed(name, array) for name, array in shared.items()),
    )


def _division(state, leading: int, mesh: AbstractMesh, auto: frozenset[str], token_axes: TokenAxes):
    """The mesh axes that divide each token axis, or None and the reason."""
    if isinstance(token_axes, PartitionSpec):
        given = [_names(entry) for entry in token_axes]
    else:
        given = [_names(token_axes if token_axes is None or isinstance(token_axes, str) else tuple(token_axes))]
    unknown = [name for names in given for name in names if name not in mesh.shape]
    if unknown:
        raise ValueError(f"token_axes names {unknown[0]!r}, but the mesh has the axes {', '.join(mesh.axis_names)}")
    if any(given[leading:]):
        return None, f"token_axes {token_axes!r} divides more than the {leading} axes that may be divided"
    if token_axes is None and any(mesh.shape[name] > 1 for name in auto):
        sizes = ", ".join(f"{name}={mesh.shape[name]}" for name in mesh.axis_names if name in auto)
        return None, (
            f"how the Auto axes of the mesh ({sizes}) divide the tokens cannot be seen; "
            "pass token_axes, the names of those that divide the batch, or make the axes Explicit"
        )
    spec = []
    for i in range(leading):
        names = tuple(name for name in (given[i] if i < len(given) else ()) if name in auto)
        parts = math.prod(mesh.shape[name] for name in names)
        if state.shape[i] % parts:
            return None, f"{state.shape[i]} along token axis {i} are not divisible by the {parts} devices of {names}"
        spec.append(_names(state.sharding.spec[i]) + names or None)
    return PartitionSpec(*spec), None


def _names(entry: Any) -> tuple[str, ...]:
    """The mesh axes in one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _known(implementation: str) -> None:
    if implementation not in get_args(Implementation):
        known = ", ".join(map(repr, get_args(Implementation)))
        raise ValueError(f"implementation {implementation!r} is not known; use one of {known}")


def _not_hopper(device: jax.Device) -> str | None:
    """Why the kernels do not run on `device`."""
    capability = str(getattr(device, "compute_capability", ""))
    if device.platform != "gpu":
        return "no Hopper GPU here"
    return None if capability.startswith("9.") else f"{device.device_kind} is no Hopper GPU (sm_90)"


@functools.cache
def _say(level: int, message: str) -> None:
    """Logs a message, once."""
    _log.log(level, message)


def _interpreter():
    from jax.experimental.pallas import mosaic_gpu as plgpu  # a third of a second, for those who use it

    return plgpu.InterpretGPUParams()
