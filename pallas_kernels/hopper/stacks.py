"""What one loop of a program stacks up and a later loop takes apart: with autodiff, what is saved for backward."""

from collections.abc import Iterator

from pallas_kernels.hopper.program import Array, Computation, Instruction, Program


def stacks(program: Program) -> list[Array]:
    """The arrays that a loop fills slice by slice, and that a later loop of the same computation only reads.

    A training step that scans over its layers saves so what backward needs of each. Of a program without loops nothing
    is known: the list is empty.
    """
    found = []
    for computation in program.computations.values():
        loops = {one.name: one for one in computation.instructions if one.operation == "while"}
        seen: set[tuple[str, int]] = set()
        for reader in loops.values():
            start = computation.behind(reader.operands[0])
            for index in _kept(program, reader):
                for source in _sources(computation, start.operands[index], loops):
                    writer, element = source
                    if source not in seen and element not in _kept(program, loops[writer]):
                        seen.add(source)
                        found.append(loops[writer].shape[element])
    return found


def _body(program: Program, loop: Instruction) -> Computation:
    return program.computations[loop.attribute("body").removeprefix("%")]


def _kept(program: Program, loop: Instruction) -> set[int]:
    """The elements of a loop's state that it leaves as they are: what it reads."""
    body = _body(program, loop)
    (state,) = body.parameters
    return {
        place
        for place, name in enumerate(body.root.operands)
        if (made := body.behind(name)).operation == "get-tuple-element"
        and made.operands == (state.name,)
        and int(made.attribute("index")) == place
    }


def _sources(computation: Computation, name: str, loops: dict[str, Instruction]) -> Iterator[tuple[str, int]]:
    """(loop, element) that an array is, perhaps moved to another place or layout."""
    made = computation.behind(name)
    while made.operation in ("copy", "fusion", "bitcast") and len(made.operands) == 1:
        made = computation.behind(made.operands[0])
    if made.operation == "get-tuple-element" and made.operands[0] in loops:
        yield made.operands[0], int(made.attribute("index"))
