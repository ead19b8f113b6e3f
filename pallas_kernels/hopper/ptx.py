"""What the PTX assembler makes of a kernel: registers, spills, shared memory, and blocks per multiprocessor.

Mosaic GPU writes its intermediate files where the environment variable MOSAIC_GPU_DUMP_TO points, when XLA compiles the
kernel: the PTX, what `ptxas -v` said about it, and the log of its passes, which ends with the shared memory that the
launch asks for (the PTX does not say). That beats MOSAIC_GPU_DUMP_PTX, which prints on this process's stdout.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import os
from pathlib import Path
import re
import sys
import tempfile

from pallas_kernels.h200 import (
    BLOCKS,
    QUARTERS,
    REGISTERS,
    REGISTERS_UNIT,
    SHARED_MEMORY,
    SHARED_MEMORY_PER_BLOCK,
    SHARED_MEMORY_RESERVED,
    SHARED_MEMORY_UNIT,
    THREADS,
    WARP,
)

_ENTRY = re.compile(r"^\.visible \.entry (\S+?)\(", re.MULTILINE)
_THREADS = re.compile(r"^\.(?:maxntid|reqntid) (\d+)(?:, (\d+))?(?:, (\d+))?", re.MULTILINE)
_REGISTERS = re.compile(r"Used (\d+) registers(?:.*?, (\d+) bytes smem)?")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_LAUNCH = re.compile(r"mosaic_gpu\.smem_bytes = (\d+)")
_NOISE = (b"nvdisasm invocation failed", b"=== Source Location Trace: ===", b"jaxlib/mosaic/gpu/dump.cc:")


@dataclasses.dataclass(frozen=True)
class Resources:
    """What one block of a kernel takes. Registers are counted per thread, shared memory in bytes per block."""

    name: str
    threads: int
    registers: int
    spill_stores: int  # bytes per thread
    spill_loads: int  # bytes per thread
    static_shared_memory: int
    dynamic_shared_memory: int

    @property
    def spill_bytes(self) -> int:
        """Bytes per thread that are stored to and loaded from local memory for want of registers."""
        return self.spill_stores + self.spill_loads

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory per block. Mosaic GPU declares one static byte, to have a name for the dynamic ones."""
        return self.static_shared_memory + self.dynamic_shared_memory

    @property
    def blocks_per_multiprocessor(self) -> int:
        """How many blocks are resident at once on one multiprocessor of an H200; 0 means that it cannot be launched."""
        if self.dynamic_shared_memory > SHARED_MEMORY_PER_BLOCK:
            return 0
        warps = -(-self.threads // WARP)
        warp_registers = _round_up(self.registers * WARP, REGISTERS_UNIT)
        shared = _round_up(self.shared_memory_bytes + SHARED_MEMORY_RESERVED, SHARED_MEMORY_UNIT)
        return min(
            BLOCKS,
            THREADS // (warps * WARP),
            QUARTERS * (REGISTERS // QUARTERS // warp_registers) // warps,
            SHARED_MEMORY // shared,
        )


def parse(ptx: str, ptxas: str, passes: str) -> Resources:
    """Reads the three files that Mosaic GPU leaves of one kernel.

    Args:
        ptx: the PTX.
        ptxas: what `ptxas -v` printed for it.
        passes: the log of Mosaic GPU's passes.

    Raises:
        ValueError: a file lacks what this reads from it, which names the file and the pattern.
    """
    entry = _search(_ENTRY, ptx, "the PTX")
    threads = 1
    for size in _search(_THREADS, ptx, "the PTX").groups():
        threads *= int(size or 1)
    registers = _search(_REGISTERS, ptxas, "ptxas's report")
    spills = _search(_SPILLS, ptxas, "ptxas's report")
    _search(_LAUNCH, passes, "the log of the passes")
    return Resources(
        name=entry[1].removesuffix("_kernel").removesuffix("_mosaic_gpu"),
        threads=threads,
        registers=int(registers[1]),
        spill_stores=int(spills[1]),
        spill_loads=int(spills[2]),
        static_shared_memory=int(registers[2] or 0),
        dynamic_shared_memory=int(_LAUNCH.findall(passes)[-1]),
    )


@contextlib.contextmanager
def recorded() -> Iterator[list[Resources]]:
    """Fills the list with every Mosaic GPU kernel that XLA compiles inside the `with` block, when the block ends.

    A kernel that this process compiled before is taken from a cache and does not appear again.
    """
    found: list[Resources] = []
    before = os.environ.get("MOSAIC_GPU_DUMP_TO")
    with tempfile.TemporaryDirectory() as directory:
        os.environ["MOSAIC_GPU_DUMP_TO"] = directory
        try:
            with _without_noise():
                yield found
        finally:
            if before is None:
                del os.environ["MOSAIC_GPU_DUMP_TO"]
            else:
                os.environ["MOSAIC_GPU_DUMP_TO"] = before
        for ptx in sorted(Path(directory).glob("*.ptx")):
            report, passes = ptx.with_suffix(".ptxas"), ptx.with_suffix(".mlir-passes.log")
            found.append(parse(ptx.read_text(), report.read_text(), passes.read_text()))


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    """Holds back what C++ writes to stderr, and lets through afterwards all but the complaints about nvdisasm.

    A dump includes the machine code's disassembly, which nobody asked for, and whose tool may not be there.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            held.seek(0)
            lines = [line for line in held if not line.startswith(_NOISE)]
            os.write(2, b"".join(lines) if any(line.strip() for line in lines) else b"")


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _search(pattern: re.Pattern, text: str, what: str) -> re.Match:
    match = pattern.search(text)
    if match is None:
        raise ValueError(
            f"{what} has nothing like {pattern.pattern!r}: this jax writes it differently; teach {__name__}"
        )
    return match
