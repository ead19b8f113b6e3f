"""The bytes that one instruction of a compiled program reads and writes.

A fusion reads each operand once, but only what its result needs of it: a slice of a stack counts as the slice, a
gathered row as the row. What is updated in place is written where it changes, and not read. The caches are not
modelled: an operand that a fusion reads twice counts once.
"""

import collections
from typing import NamedTuple

from pallas_kernels.hopper.program import Array, Computation, Instruction, Program, Shape, leaves

UPDATES = ("dynamic-update-slice", "scatter")
_NOTHING = ("parameter", "constant", "iota", "rng", "partition-id", "replica-id")


class Accesses(NamedTuple):
    """Bytes of one run of an instruction."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written


def accesses(program: Program, computation: Computation, instruction: Instruction) -> Accesses:
    """What an instruction of `computation` reads and writes: a fusion, or any operation on its own."""
    body = _body(program, computation, instruction)
    place = computation.place[instruction.name]

    def kept(parameter: Instruction) -> bool:
        """Whether somebody reads the parameter's memory later, so that it cannot be written to."""
        operand = computation.behind(instruction.operands[int(parameter.literal)])
        return computation.last_use[operand.name] > place

    needed, written = _needed(program, body, kept)
    read = sum(needed[p.name] * p.shape.item_bytes for p in body.parameters if isinstance(p.shape, Array))
    return Accesses(round(read), round(written))


def result(instruction: Instruction) -> Shape:
    """The shape of what an instruction makes; of the start of an asynchronous one, what it will have made."""
    shape = instruction.shape
    if not instruction.operation.endswith("-start") or not isinstance(shape, tuple):
        return shape
    # copy-start: (result, operand, context); others: (operands, result, …), but all-reduce-start: results.
    if instruction.operation == "copy-start":
        return shape[0]
    return shape if instruction.operation == "all-reduce-start" else shape[1]


def _body(program: Program, computation: Computation, instruction: Instruction) -> Computation:
    """The computation that a fusion calls; for another operation, one with that operation alone."""
    if instruction.operation.startswith("fusion"):
        return program.computations[instruction.called[0]]
    parameters = [
        Instruction(str(number), computation.by_name[operand].shape, "parameter", (), str(number), "", False)
        for number, operand in enumerate(instruction.operands)
    ]
    names = tuple(parameter.name for parameter in parameters)
    operation = instruction.operation.removesuffix("-start")
    root = Instruction("root", result(instruction), operation, names, instruction.literal, instruction.attributes, True)
    return Computation(instruction.name, (*parameters, root))


def _needed(program: Program, body: Computation, kept=lambda parameter: False):
    """How many elements are needed of each instruction's result, by name, and the bytes that are written."""
    needed: dict[str, float] = collections.defaultdict(float)
    in_place: set[str] = set()
    written = 0.0
    results = body.root.operands if body.root.operation == "tuple" else (body.root.name,)
    for name in results:
        changed = _changed_in_place(body, name, kept)
        if changed is None:
            needed[name] = sum(leaf.elements for leaf in leaves(body.by_name[name].shape))
            written += sum(leaf.bytes for leaf in leaves(body.by_name[name].shape))
        else:
            in_place.update(instruction.name for instruction in changed)
            written += sum(_update(body, instruction).shape.bytes for instruction in changed)
            needed[name] = 1  # so that it is looked at
    for instruction in reversed(body.instructions):
        wanted = needed[instruction.name]
        whole = sum(leaf.elements for leaf in leaves(instruction.shape))
        needed[instruction.name] = wanted = min(wanted, whole)
        if wanted and instruction.operation not in _NOTHING and not (instruction.root and len(results) > 1):
            for operand, elements in _asks(program, body, instruction, wanted, whole, instruction.name in in_place):
                needed[operand] += elements
    return needed, written


def _changed_in_place(body: Computation, name: str, kept) -> list[Instruction] | None:
    """The updates that make a result out of a parameter that nobody else needs; None if it is made anew."""
    changed, instruction = [], body.behind(name)
    while instruction.operation in UPDATES:
        changed.append(instruction)
        instruction = body.behind(instruction.operands[0])
    return changed if changed and instruction.operation == "parameter" and not kept(instruction) else None


def _update(body: Computation, instruction: Instruction) -> Instruction:
    """The operand that holds what is written."""
    if isinstance(instruction.shape, tuple):
        raise NotImplementedError(f"a scatter into several arrays at once: {instruction.name}")
    return body.by_name[instruction.operands[1 if instruction.operation == "dynamic-update-slice" else -1]]


def _asks(program: Program, body: Computation, instruction: Instruction, wanted: float, whole: int, in_place: bool):
    """(operand, elements needed of it) when `wanted` of the `whole` elements of a result are."""
    operands, operation, share = instruction.operands, instruction.operation, wanted / whole

    def size(operand: str) -> int:
        return sum(leaf.elements for leaf in leaves(body.by_name[operand].shape))

    if operation in ("slice", "dynamic-slice", "gather"):
        yield operands[0], wanted
        yield from ((operand, share * size(operand)) for operand in operands[1:])
    elif operation in UPDATES and in_place:
        update = _update(body, instruction)
        behind = body.behind(operands[0])
        if behind.operation in UPDATES:
            yield operands[0], 1  # so that it is looked at
        elif operation == "scatter":  # adds to what is there
            yield operands[0], update.shape.elements
        yield from ((operand, size(operand)) for operand in operands[1:])
    elif operation == "fusion":
        inner = program.computations[instruction.called[0]]
        needed, _ = _needed(program, inner)
        for operand, parameter in zip(operands, inner.parameters, strict=True):
            yield operand, share * needed[parameter.name]
    elif operation in ("dot", "convolution", "sort", "tuple", "get-tuple-element"):
        yield from ((operand, size(operand)) for operand in operands)
    elif operation == "broadcast":
        yield operands[0], min(wanted, size(operands[0]))
    else:
        yield from ((operand, share * size(operand)) for operand in operands)
