"""What the programs become on an H200, without one: the bytes they move and what a kernel takes."""

from collections.abc import Sequence
import dataclasses

from pallas_kernels import hopper
from pallas_kernels.compare.operations import Comparison
from pallas_kernels.hopper.measure import measure

TITLES = ("moved/minimum", "registers", "spill bytes", "blocks/multiprocessor", "bytes in flight")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One implementation of one pass, compiled for an H200.

    Attributes:
        moved: bytes between memory and chip, as a multiple of the least; None if not known.
        taken: `hopper.measure` of the kernel, where the implementation is one.
    """

    moved: float | None
    taken: dict | None = None

    def cells(self) -> tuple[str, ...]:
        """Under `TITLES`."""
        moved = "–" if self.moved is None else f"{self.moved:.3f}"
        keys = ("registers", "spill_bytes", "blocks_per_multiprocessor", "bytes_in_flight")
        return (moved, *(f"{self.taken[key]:,}" if self.taken else "–" for key in keys))


def columns(programs: Sequence[Compiled]) -> dict[str, list[str]]:
    """Their cells by the columns' titles."""
    cells = [program.cells() for program in programs]
    return {title: [line[i] for line in cells] for i, title in enumerate(TITLES)}


def compiled(comparison: Comparison, implementation: str) -> Compiled:
    """Compiles one implementation of one pass for an H200.

    Pallas: the bytes are summed over the kernel's own copies. XLA: every kernel of its program is taken to read its
    operands once and to write its results once, as if nothing stayed in the cache between two of them.

    Raises:
        MissingExtra: the extra compile is not installed.
    """
    least = comparison.case.minimum_bytes
    if implementation == "pallas":
        taken = measure(comparison.case)
        return Compiled(taken["bytes_moved"] / least, taken)
    program = hopper.compile_for(comparison.run(implementation), *comparison.abstract_call(implementation))
    return Compiled(hopper.bytes_accessed(program) / least)


def moved(comparison: Comparison, implementation: str) -> Compiled:
    """What of it is known without the extra compile: the bytes that a kernel's own copies move."""
    if implementation != "pallas":
        return Compiled(None)
    case = comparison.case
    return Compiled(hopper.bytes_moved(case.function, *case.arguments).moved / case.minimum_bytes)
