"""How exact and how fast each implementation is on the device at hand."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math

import jax

from pallas_kernels import cases
from pallas_kernels.compare import timing
from pallas_kernels.compare.operations import Comparison

COPY = 2**28  # bytes: what is copied to know the bandwidth
# What an error may be. A result in bfloat16 is rounded by up to 2⁻⁹ of the power of two below it, and the reversible
# backward starts from a rounded state, so that it gets twice that. float32 adds up a few thousand products, each with
# an error of 2⁻²⁴, of which most cancel.
MOST_ERROR = {"bfloat16": 2.0**-8, "float32": 1e-5}


@dataclasses.dataclass
class Outcome:
    """What is known of one implementation; None where nothing is.

    Attributes:
        seconds: per call, the median.
        copied: bytes per second that were copied (read and written) in turns with it.
        relative_error: as in `oracle`; may be NaN.
    """

    seconds: float | None = None
    copied: float | None = None
    relative_error: float | None = None


def measure(
    comparison: Comparison,
    implementations: Sequence[str],
    *,
    tokens: int,
    timed: bool,
    complain: Callable[[str], None],
) -> dict[str, Outcome]:
    """Measures the implementations, in turns. One that fails does not keep the other from being measured.

    Args:
        comparison: what they do.
        implementations: `xla`, `pallas`.
        tokens: how many of them are compared with float64.
        timed: whether the times of this device mean anything.
        complain: takes what failed or is wrong, in words.
    """
    outcomes = {name: Outcome() for name in implementations}
    most = MOST_ERROR[cases.SHAPES[comparison.shape].dtype]
    for name, outcome in outcomes.items():
        try:
            outcome.relative_error = error = comparison.relative_error(name, tokens)
        except Exception as failure:  # whatever XLA, Mosaic or the GPU make of it
            complain(f"{comparison} {name}: {first_line(failure)}")
        else:
            if not error <= most:
                complain(f"{comparison} {name}: relative error {error:.1e}; {most:.1e} is allowed")
    if timed:
        _time(comparison, outcomes, complain)
    return outcomes


def _time(comparison: Comparison, outcomes: dict[str, Outcome], complain) -> None:
    count = timing.calls_for(comparison.case.minimum_bytes)
    arguments = [comparison.arguments(seed) for seed in range(count)]
    programs = {"copy": _copy()}
    for name in outcomes:
        try:
            calls = [comparison.call(name, each, count + seed) for seed, each in enumerate(arguments)]
            program = timing.program(comparison.run(name), calls)
            jax.block_until_ready(program.enqueue())
            programs[name] = program
        except Exception as failure:
            complain(f"{comparison} {name}: {first_line(failure)}")
    try:
        seconds = timing.median_seconds(programs)
    except Exception as failure:
        complain(f"{comparison}: {first_line(failure)}")
        return
    for name in programs.keys() & outcomes.keys():
        outcomes[name].seconds, outcomes[name].copied = seconds[name], 2 * COPY / seconds["copy"]


@functools.cache
def _copy() -> timing.Program:
    return timing.copy(COPY)


def first_line(failure: Exception) -> str:
    """What failed, in one line."""
    text = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {text[0] if text else ''}"


def row(comparison: Comparison, implementation: str, outcome: Outcome) -> dict[str, str | float | None]:
    """`report.COLUMNS` by name. A shape that the cache holds is not compared with a copy, which goes to memory."""
    seconds, least, speed, fraction = outcome.seconds, comparison.case.minimum_bytes, None, None
    if seconds is not None:
        speed = least / seconds
        fraction = speed / outcome.copied if timing.uncached(least) else None
    return {
        "operation": comparison.what.operation,
        "shape": comparison.shape,
        "pass": comparison.what.direction,
        "implementation": implementation,
        "seconds": seconds,
        "gigabytes_per_second": None if speed is None else speed / 1e9,
        "copy_fraction": fraction,
        "relative_error": outcome.relative_error,
    }


def finite(row: dict[str, str | float | None]) -> dict[str, str | float | None]:
    """The row as JSON can hold it: NaN and infinity become None."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
