"""Counts the bytes that a function's Mosaic GPU kernels move between the GPU's memory and the chip."""

from collections.abc import Callable, Iterator
import dataclasses
from typing import Any

import jax

from pallas_kernels.traffic.jaxprs import CALLS, inner_jaxprs
from pallas_kernels.traffic.programs import Kernel
from pallas_kernels.traffic.schedule import bytes_in_flight

_OUTER_CALLS = CALLS | {"custom_vjp_call", "custom_vmap_call", "shard_map"}


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What the kernels of a function move, on one device.

    Attributes:
        loaded: bytes from memory to the chip.
        stored: bytes from the chip to memory.
        per_operand: (loaded, stored) of each input and output of the kernels, by its place: `input 0`, `output 1`.
        in_flight: bytes that one block has asked for and not yet waited for while it computes; see
            `schedule.bytes_in_flight`. Of a function's kernels, that which moves the most.
        blocks: in the grid of that kernel.
    """

    loaded: int
    stored: int
    per_operand: dict[str, tuple[int, int]]
    in_flight: int
    blocks: int

    @property
    def moved(self) -> int:
        """Bytes moved in both directions."""
        return self.loaded + self.stored


def bytes_moved(function: Callable, *arguments: Any) -> Traffic:
    """Counts what every Mosaic GPU kernel in `function` moves; what XLA's own kernels move is not included.

    Args:
        function: of `arguments`.
        arguments: arrays or `jax.ShapeDtypeStruct`s; nothing runs.

    Raises:
        ValueError: there is no Mosaic GPU kernel in it.
        NotImplementedError: something in it could move bytes in a way that this does not understand, or how often it
            moves them depends on data.
    """
    kernels = []
    _find(jax.make_jaxpr(function)(*arguments).jaxpr, 1, kernels)
    if not kernels:
        raise ValueError(f"{getattr(function, '__name__', function)} contains no Mosaic GPU kernel")
    loaded, stored, per_operand = 0, 0, {}
    runs = [(Kernel(equation), times) for equation, times in kernels]
    for kernel, times in runs:
        for operand in kernel.operands:
            before = per_operand.get(operand.name, (0, 0))
            per_operand[operand.name] = (before[0] + times * operand.loaded, before[1] + times * operand.stored)
            loaded, stored = loaded + times * operand.loaded, stored + times * operand.stored
    largest = max((kernel for kernel, _ in runs), key=lambda kernel: sum(o.loaded + o.stored for o in kernel.operands))
    return Traffic(loaded, stored, per_operand, bytes_in_flight(largest.events), largest.blocks)


def traffic_of_kernels(jaxpr: Any) -> list[tuple[Any, int, int]]:
    """Every Mosaic GPU kernel in a jaxpr, at any depth, with what one run of it moves.

    How often each runs is not asked, nor on which platform: that is for whoever has the compiled program.

    Args:
        jaxpr: such as that of `jax.jit(function).trace(...)`.

    Returns:
        For each: its equation (`params["name"]` is its name), the bytes that it loads, and those that it stores.

    Raises:
        NotImplementedError: as `bytes_moved`.
    """
    counted: dict[int, tuple[int, int]] = {}  # traced once, a kernel may stand in many places
    found = []
    for equation in _kernels(jaxpr):
        (body,) = equation.params["jaxprs"]
        if id(body) not in counted:
            operands = Kernel(equation).operands
            counted[id(body)] = sum(o.loaded for o in operands), sum(o.stored for o in operands)
        found.append((equation, *counted[id(body)]))
    return found


def _kernels(jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "mpmd_map":
            yield equation
        else:
            for body in inner_jaxprs(equation.params):
                yield from _kernels(body)


def _find(jaxpr, times: int, kernels: list) -> None:
    """Appends (equation, how often it runs) for each kernel in a jaxpr."""
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "mpmd_map":
            kernels.append((equation, times))
        elif platforms := params.get("branches_platforms"):  # a `jax.lax.platform_dependent`
            for branch, names in zip(params["branches"], platforms, strict=True):
                if names is None or "cuda" in names:
                    _find(branch.jaxpr, times, kernels)
                    break
        elif inner := list(inner_jaxprs(params)):
            before = len(kernels)
            for body in inner:
                _find(body, times * params["length"] if name == "scan" else times, kernels)
            if len(kernels) > before and name not in _OUTER_CALLS | {"scan"}:
                raise NotImplementedError(f"how often {name} runs the kernel inside it is not known")
