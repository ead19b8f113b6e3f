"""What a whole compiled program moves and computes in one run, loops included: `cost`."""

import collections
from collections.abc import Iterator
import dataclasses
import functools
import math
import re

from pallas_kernels.hopper import custom_calls
from pallas_kernels.hopper.accesses import Accesses, accesses, result
from pallas_kernels.hopper.custom_calls import Kernels
from pallas_kernels.hopper.hlo import OPERATIONS
from pallas_kernels.hopper.program import Computation, Instruction, Program, leaves, shape_bytes

# Name memory, and move none. What ends an asynchronous operation was counted where it started.
_FREE = frozenset({
    "parameter", "bitcast", "get-tuple-element", "tuple", "constant", "after-all", "add-dependency", "opt-barrier",
    "partition-id", "replica-id", "domain", "iota",
})  # fmt: skip
_LAYOUT = frozenset({"parameter", "constant", "bitcast", "copy", "transpose", "convert", "reshape", "tuple"})
_CUTS = frozenset({"slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "get-tuple-element"})


@dataclasses.dataclass(frozen=True)
class Part:
    """One instruction of the program that moves bytes, over all its runs.

    Attributes:
        name: of the instruction.
        kind: `matrix products`, `attention`, `kernel NAME`, `gathers and scatters`, `reductions`, `elementwise`,
            `copies and casts`, `fills` or `collectives`.
        runs: how often it runs.
        accesses: bytes of one run.
        flops: of the matrix products of one run, by what they multiply.
        shape: of its result.
        path: where it comes from.
        wire: of a collective, the bytes that one device sends in one run.
        span: of a collective, from the first to the last of the devices that take part together, both counted.
    """

    name: str
    kind: str
    runs: int
    accesses: Accesses
    flops: dict[str, int]
    shape: str
    path: str
    wire: int = 0
    span: int = 1

    @property
    def bytes(self) -> int:
        """Moved between memory and the chip, all runs together; a collective moves none."""
        return self.runs * self.accesses.total


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one run of a program moves and computes on one device.

    Attributes:
        parts: every instruction that moves something.
    """

    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        """Between the GPU's memory and the chip."""
        return sum(part.bytes for part in self.parts)

    @property
    def collective_bytes(self) -> int:
        """That one device sends to others, with ring algorithms."""
        return sum(self.collective_bytes_within(1))

    def collective_bytes_within(self, host: int) -> tuple[int, int]:
        """Those of collectives within hosts of so many devices, and those of collectives between hosts."""
        near = sum(part.runs * part.wire for part in self.parts if part.span <= host)
        return near, sum(part.runs * part.wire for part in self.parts) - near

    @functools.cached_property
    def flops(self) -> dict[str, int]:
        """Of matrix products, by what they multiply (the keys of `h200.PRODUCTS`), a multiply-add counting as two."""
        total: collections.Counter[str] = collections.Counter()
        for part in self.parts:
            total.update({dtype: part.runs * flops for dtype, flops in part.flops.items()})
        return dict(total)

    def bytes_by_kind(self) -> dict[str, int]:
        """The bytes of each kind of part, the most first."""
        total: collections.Counter[str] = collections.Counter()
        for part in self.parts:
            total[part.kind] += part.bytes
        return {kind: moved for kind, moved in total.most_common() if moved}


def cost(program: Program, kernels: Kernels | None = None) -> Cost:
    """Counts what a program moves and computes, with the trips of its loops.

    Args:
        program: from `parse`.
        kernels: what each of its Mosaic GPU kernels moves (`custom_calls.known_kernels`).

    Raises:
        UnknownCustomCall: it calls something whose bytes are not known.
        ValueError: how often a loop runs is not known, or which branch of a condition.
    """
    return Cost(tuple(_walk(program, program.main, 1, {} if kernels is None else kernels)))


def _walk(program: Program, computation: Computation, runs: int, kernels: Kernels) -> Iterator[Part]:
    for instruction in computation.instructions:
        operation = instruction.operation
        if operation in _FREE or operation.endswith("-done") or operation == "async-update":
            continue
        if operation == "while":
            if instruction.trips is None:
                raise ValueError(f"how often the loop {instruction.name} runs is not known")
            for name in instruction.called:
                yield from _walk(program, program.computations[name], runs * instruction.trips, kernels)
        elif operation in ("call", "async-start"):
            for name in instruction.called:
                yield from _walk(program, program.computations[name], runs, kernels)
        elif operation == "conditional":
            raise ValueError(f"which branch of {instruction.name} runs is not known")
        else:
            yield _part(program, computation, instruction, runs, kernels)


def _part(program: Program, computation: Computation, instruction: Instruction, runs: int, kernels: Kernels) -> Part:
    shape = ", ".join(map(str, leaves(result(instruction))))
    path = "/".join(instruction.path)
    collective = instruction.operation.removesuffix("-start")
    if collective in OPERATIONS:
        group, span = _group(instruction)
        wire = _wire(computation, instruction, collective, group)
        return Part(instruction.name, "collectives", runs, Accesses(0, 0), {}, shape, path, wire, span)
    where, calls = computation, [instruction] if instruction.operation == "custom-call" else []
    if instruction.operation.startswith("fusion"):
        where = program.computations[instruction.called[0]]
        calls = [inner for inner in where.instructions if inner.operation == "custom-call"]
    if calls:
        # Around a call, a fusion only says where in a stack its operands and results lie.
        path = "/".join(calls[0].path)
        moved = [custom_calls.call_accesses(where, call, kernels) for call in calls]
        flops: collections.Counter[str] = collections.Counter()
        for call in calls:
            flops[custom_calls.call_type(where, call).dtype] += custom_calls.call_flops(where, call)
        total = Accesses(sum(one.read for one in moved), sum(one.written for one in moved))
        return Part(instruction.name, custom_calls.kind(calls[0]), runs, total, dict(+flops), shape, path)
    moved = accesses(program, computation, instruction)
    flops = _dots(program, computation, instruction)
    return Part(instruction.name, _kind(program, instruction, flops), runs, moved, flops, shape, path)


def _inside(program: Program, instruction: Instruction) -> Iterator[Instruction]:
    """The instruction, or what it fuses, at any depth."""
    if not instruction.operation.startswith("fusion"):
        yield instruction
        return
    for inner in program.computations[instruction.called[0]].instructions:
        yield from _inside(program, inner)


def _kind(program: Program, instruction: Instruction, flops: dict[str, int]) -> str:
    arrays = (inner for inner in _inside(program, instruction) if any(leaf.sizes for leaf in leaves(inner.shape)))
    operations = {inner.operation for inner in arrays}  # what is done to indices says nothing
    if flops:
        return "matrix products"
    if not operations:
        return "elementwise"
    if operations & {"gather", "scatter"}:
        return "gathers and scatters"
    if operations & {"reduce", "reduce-window"}:
        return "reductions"
    if operations <= _LAYOUT | _CUTS | {"copy-start"}:
        return "copies and casts"
    if not instruction.operands:
        return "fills"
    return "elementwise"


def _dots(program: Program, computation: Computation, instruction: Instruction) -> dict[str, int]:
    """FLOPs of the matrix products in an instruction, by the dtype of what is multiplied."""
    total: collections.Counter[str] = collections.Counter()
    if instruction.operation.startswith("fusion"):
        inner = program.computations[instruction.called[0]]
        for fused in inner.instructions:
            total.update(_dots(program, inner, fused))
    elif instruction.operation == "dot":
        left = computation.by_name[instruction.operands[0]].shape
        axes = instruction.attribute("lhs_contracting_dims")
        contracted = math.prod(left.sizes[int(axis)] for axis in axes.split(",") if axis)
        exact = left.dtype == "f32" and "highest" in instruction.attribute("operand_precision")
        total["exact f32" if exact else left.dtype] += 2 * instruction.shape.elements * contracted
    elif instruction.operation == "convolution":
        raise NotImplementedError(f"nobody has taught this package the FLOPs of a convolution: {instruction.name}")
    return dict(total)


def _wire(computation: Computation, instruction: Instruction, operation: str, group: int) -> int:
    """Bytes that one device sends in one collective of so many devices, with a ring algorithm."""
    operands = sum(shape_bytes(computation.by_name[name].shape) for name in instruction.operands)
    if operation == "collective-permute":
        return operands
    return round({"all-reduce": 2, "all-gather": group}.get(operation, 1) * operands * (group - 1) / group)


def _group(instruction: Instruction) -> tuple[int, int]:
    """How many devices take part in a collective together, and how far they are apart: the last less the first, and 1.

    Devices are numbered along the mesh, its last axis first, so that those of a host are next to each other.
    """
    text = instruction.attributes
    if found := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", text):  # mesh['data'=4,'fsdp'=2] {'data'}
        mesh = [(name, int(size)) for name, size in re.findall(r"'([^']*)'=(\d+)", found[1])]
        parts = {name: int(part or 0) for name, part in re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", found[2])}
        group, last, stride = 1, 0, 1
        for name, size in reversed(mesh):
            if name in parts:  # 'data', or a part of it: 'data':(1)2
                group *= parts[name] or size
                last += (size - 1) * stride
            stride *= size
        return group, last + 1
    if found := re.search(r"replica_groups=\[(?:\d+,)*(\d+)\]<=\[([\d,]+)\](T\(.*?\))?", text):  # [2,4]<=[8]
        size = int(found[1])
        return size, math.prod(map(int, found[2].split(","))) if found[3] else size
    pairs = instruction.operation.startswith("collective-permute")
    if found := re.search(rf"{'source_target_pairs' if pairs else 'replica_groups'}=\{{(\{{.*?\}})\}}", text):
        groups = [[int(device) for device in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", found[1])]
        return len(groups[0]), max(max(group) - min(group) for group in groups) + 1
    raise ValueError(f"between which devices {instruction.name} runs is not known")
