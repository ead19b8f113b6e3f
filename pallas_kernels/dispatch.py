"""Between the public operations and their implementations: which of them runs.

An operation takes arrays that begin with token axes (`tokens`: the state, the branch, …) and arrays that all tokens
share (`shared`: weights). It returns arrays that begin with token axes, and sums over all tokens (the gradients of what
is shared). `plan` settles what may run when the operation is called; `Plan.run` runs it, in forward and again in
backward, from inside of `custom_vjp`.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import logging
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from pallas_kernels.layout import Layout, TokenAxes, layout

Implementation = Literal["auto", "xla", "pallas"]
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
        implementation: `auto` is decided when the program is lowered, by the platform it is lowered for.
        leading: how many token axes are independent of each other; the kernel sees them as one.
        layout: how a mesh divides those.
    """

    implementation: Implementation
    leading: int
    layout: Layout

    def run(self, pallas: Callable, xla: Callable, tokens: Arrays, shared: Arrays = ()) -> tuple[Arrays, Arrays]:
        """Runs one of two functions of the same arrays.

        Args:
            pallas: called as `pallas(*tokens, *shared, interpret=…)` on one device's part of the tokens, with their
                `leading` axes made one. Not called before a kernel is to be traced, so that it may import Pallas.
            xla: called as `xla(*tokens, *shared)`.
            tokens: the arrays with token axes.
            shared: those without.

        Returns:
            Two tuples, as both functions return them: arrays with token axes, and sums over all tokens.
        """

        def kernel(*arguments):
            shape = arguments[0].shape[: self.leading]
            parts = [a.reshape(math.prod(shape), *a.shape[self.leading :]) for a in arguments[: len(tokens)]]
            outputs, sums = pallas(*parts, *arguments[len(tokens) :], interpret=self._interpret())
            # Without the barrier, XLA of jax 0.11 runs a kernel in a loop twice where the loop saves what it gives for
            # backward: once more in a "dynamic slice fusion" that writes into the stack of what is saved.
            outputs, sums = jax.lax.optimization_barrier((outputs, sums))
            return tuple(a.reshape(*shape, *a.shape[1:]) for a in outputs), sums

        kernel = self.layout.divide(kernel, len(tokens))
        if self.layout.typed:
            xla = self.layout.divide(xla, len(tokens))
        if self.implementation == "auto":
            # On a CPU the kernel is traced, too, but never lowered; outside of jit it is not even traced.
            return jax.lax.platform_dependent(*tokens, *shared, cuda=kernel, default=xla)
        return (kernel if self.implementation == "pallas" else xla)(*tokens, *shared)

    def _interpret(self):
        if self.implementation == "auto" or self.layout.platform != "cpu":
            return None
        from jax.experimental.pallas import mosaic_gpu as plgpu  # a third of a second

        return plgpu.InterpretGPUParams(detect_races=True)


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
            Needed where axes are Auto.
        tokens: by name, the arrays with token axes; the state first.
        shared: by name, those without.
        whole: names of the state's last axes, those of which no device may hold a part only: ("channels", "width"),
            and before them "tokens" for an operation that looks at other tokens.
        unsupported: why the kernel cannot take these arrays, if it cannot.

    Returns:
        The plan, then `tokens` and `shared` laid out as it takes them.

    Raises:
        ValueError: an unknown implementation; axes that the mesh does not have; `pallas` where the kernel cannot run or
            how tokens are divided is not known (`auto` then runs XLA and says why, once); Explicit axes that divide
            what has to be whole, with any implementation.
    """
    _known(implementation)
    try:
        where, problem = layout(tokens, shared, whole, token_axes)
    except ValueError as error:
        raise ValueError(f"{operation}: {error}") from None
    reason = unsupported or problem
    if reason is None and implementation == "pallas" and where.platform == "cpu" and where.devices > 1:
        reason = "the interpreter, which runs kernels on a CPU, takes one device; use 'auto' or 'xla'"
    if reason is None and jax.default_backend() == "gpu":
        reason = _not_hopper(jax.local_devices()[0])
    if reason is not None and implementation == "pallas":
        raise ValueError(f"{operation}: {reason}")
    if reason is not None and implementation == "auto":
        # Where there is no GPU it would have been XLA anyway.
        _say(logging.INFO if where.platform == "cpu" else logging.WARNING, f"{operation} runs on XLA: {reason}")
        implementation = "xla"
    leading = next(iter(tokens.values())).ndim - len(whole)
    placed = tuple(map(where.place, tokens.values()))
    return Plan(implementation, leading, where), placed, tuple(where.place(a, shared=True) for a in shared.values())


def floating(arrays: Mapping[str, jax.typing.ArrayLike]) -> dict[str, jax.Array]:
    """The arguments of an operation as arrays.

    Raises:
        ValueError: one is not of real floating-point numbers.
    """
    found = {}
    for name, array in arrays.items():
        try:
            found[name] = jnp.asarray(array)
        except (TypeError, ValueError):
            raise ValueError(f"{name} is a {type(array).__name__}, but has to be an array") from None
        if not jnp.issubdtype(found[name].dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {found[name].dtype}, but has to be of floating-point numbers")
    return found


def number(name: str, value: float) -> float:
    """A setting that has to be known when an operation is traced.

    Raises:
        ValueError: it is not a number, not finite, or negative.
    """
    try:
        known = float(value)
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        raise ValueError(f"{name} {value!r} has to be a number that is known when the operation is traced") from None
    if not 0 <= known < math.inf:
        raise ValueError(f"{name} {value!r} has to be finite and at least 0")
    return known


def _known(implementation: str) -> None:
    if implementation not in get_args(Implementation):
        known = ", ".join(map(repr, get_args(Implementation)))
        raise ValueError(f"implementation {implementation!r} is not known; use one of {known}")


def _not_hopper(device: jax.Device) -> str | None:
    """Why the kernels do not run on `device`."""
    capability = str(getattr(device, "compute_capability", ""))
    if device.platform != "gpu":
        return "no Hopper GPU here"
    return None if capability.startswith("9.") else f"{device.device_kind} is not a Hopper GPU"


@functools.cache
def _say(level: int, message: str) -> None:
    """Logs a message, once."""
    _log.log(level, message)
