"""What one of our kernels takes and moves on an H200, and whether that is as it should be."""

import math

from pallas_kernels.cases import Case
from pallas_kernels.h200 import MULTIPROCESSORS
from pallas_kernels.hopper.compile import resources
from pallas_kernels.traffic import bytes_moved

# A kernel may move this much more than the least, from this many tokens on: below it, what every block loads for
# itself (the reader's weights) is not small beside the tokens.
MOST_MOVED = 1.05
MANY_TOKENS = 32768
LEAST_IN_FLIGHT = 32 * 1024  # bytes per multiprocessor: 4.8 TB/s for 0.9 microseconds of latency (Little's law)

COLUMNS = (
    "kernel",
    "shape",
    "registers",
    "spill_bytes",
    "shared_memory_bytes",
    "blocks_per_multiprocessor",
    "bytes_in_flight",
    "bytes_moved",
    "minimum_bytes",
)


def measure(case: Case) -> dict[str, str | int]:
    """One row of the table: `COLUMNS` by name. Bytes in flight are those of a whole multiprocessor."""
    taken = resources(case.function, *case.arguments)
    traffic = bytes_moved(case.function, *case.arguments)
    # The grid may have fewer blocks than there is room for.
    resident = min(taken.blocks_per_multiprocessor, math.ceil(traffic.blocks / MULTIPROCESSORS))
    values = (
        case.kernel,
        case.shape,
        taken.registers,
        taken.spill_bytes,
        taken.shared_memory_bytes,
        taken.blocks_per_multiprocessor,
        traffic.in_flight * resident,
        traffic.moved,
        case.minimum_bytes,
    )
    return dict(zip(COLUMNS, values, strict=True))


def faults(case: Case, row: dict[str, str | int]) -> list[str]:
    """What is wrong with a kernel, in words; empty if it is as it should be."""
    found = []
    if row["spill_bytes"]:
        found.append(f"spills {row['spill_bytes']} bytes per thread")
    if row["blocks_per_multiprocessor"] == 0:
        found.append(f"cannot be launched: {row['shared_memory_bytes']} bytes of shared memory per block")
    if case.tokens >= MANY_TOKENS and row["bytes_moved"] > MOST_MOVED * row["minimum_bytes"]:
        ratio = row["bytes_moved"] / row["minimum_bytes"]
        found.append(f"moves {ratio:.3f} times the least bytes; {MOST_MOVED} is allowed")
    if case.tokens >= MANY_TOKENS and row["bytes_in_flight"] < LEAST_IN_FLIGHT:
        found.append(f"has {row['bytes_in_flight']} bytes in flight; {LEAST_IN_FLIGHT} hide the memory's latency")
    return found
