"""How a step's peak memory grows with its micro-batch, and the largest that fits a GPU."""

from collections.abc import Callable
import dataclasses
from typing import NamedTuple

from ddl_jax.config import Config
from ddl_jax.plan.program import Step
from pallas_kernels.h200 import MEMORY

ATTEMPTS = 4  # compilations with which an answer is checked, and mended where it was wrong


class Line(NamedTuple):
    """Peak memory of a micro-batch: fixed + sequences · each, in bytes."""

    fixed: float
    each: float

    def largest(self) -> int:
        """The largest micro-batch within the GPU's memory; 0 if not even one sequence fits."""
        return max(0, int((MEMORY - self.fixed) // self.each))


def by_kind(step: Step) -> dict[str, int | None]:
    """The peak memory of a step, split.

    Returns:
        `parameters`, `optimizer`, `saved` for backward (None where layers are not scanned over: then nothing tells it
        apart) and `rest`: gradients, activations in flight, temporaries.
    """
    known = step.parameter_bytes + step.optimizer_bytes + step.saved_bytes
    return {
        "parameters": step.parameter_bytes,
        "optimizer": step.optimizer_bytes,
        "saved": step.saved_bytes or None,
        "rest": step.peak_bytes - known,
    }


def line_by_formula(config: Config, step: Step) -> Line:
    """From one compilation: what does not grow is taken to be parameters, optimiser state and gradients."""
    fixed = 2 * step.parameter_bytes + step.optimizer_bytes
    return Line(fixed, (step.peak_bytes - fixed) / config.training.microbatch_size)


def with_microbatch(config: Config, sequences: int) -> Config:
    """The configuration with another micro-batch, of which a batch has as many as before."""
    training = config.training
    batch = training.batch_size // training.microbatch_size * sequences
    training = dataclasses.replace(training, microbatch_size=sequences, batch_size=batch)
    return dataclasses.replace(config, training=training)


class Fit(NamedTuple):
    """The largest micro-batch that fits, and how that is known.

    Attributes:
        largest: in sequences; 0 if not even one fits.
        peaks: compiled: (micro-batch, peak bytes), in order.
        predicted: what the line through the first two said the peak of `largest` would be; None if nothing fits.
    """

    largest: int
    peaks: tuple[tuple[int, int], ...]
    predicted: float | None


def fit(config: Config, compiled: Callable[[Config], Step]) -> Fit:
    """Compiles two micro-batches, draws a line through their peaks, and compiles the largest that it says will fit.

    Where that peak is not what the line said, a line through the two that are nearest to the GPU's memory says what is
    tried next.

    Args:
        config: as `compiled_step` takes it.
        compiled: the step of a configuration.
    """
    peaks: dict[int, int] = {}

    def measure(sequences: int) -> None:
        peaks[sequences] = compiled(with_microbatch(config, sequences)).peak_bytes

    given = config.training.microbatch_size
    for size in sorted({given, given // 2 or 2}):
        measure(size)
    line = first_line = _line(*peaks.items())
    for _ in range(ATTEMPTS):
        candidate = line.largest()
        if over := [size for size, peak in peaks.items() if peak > MEMORY]:
            candidate = min(candidate, min(over) - 1)
        candidate = max(candidate, _largest_of(peaks))
        if candidate == 0 or candidate in peaks:
            break
        measure(candidate)
        line = _line(*sorted(peaks.items(), key=lambda point: abs(point[1] - MEMORY))[:2])
    largest = _largest_of(peaks)
    predicted = first_line.fixed + largest * first_line.each if largest else None
    return Fit(largest, tuple(sorted(peaks.items())), predicted)


def _largest_of(peaks: dict[int, int]) -> int:
    return max((size for size, peak in peaks.items() if peak <= MEMORY), default=0)


def _line(first: tuple[int, int], second: tuple[int, int]) -> Line:
    each = (second[1] - first[1]) / (second[0] - first[0])
    return Line(first[1] - each * first[0], each)
