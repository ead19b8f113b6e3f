"""The exceptions a person sees: one readable line each, shown without a traceback."""

from collections.abc import Iterable
import difflib
import math


class InputError(ValueError):
    """Something the user gave cannot be used. The message is one line: path, value, rule, and what would be legal."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A suggestion for a misspelt `word` ("; did you mean 'width'?"), or a list of what is `known`."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def nearest_multiples(value: int, divisor: int) -> str:
    """The multiples of `divisor` around `value`, as text ("768, 774"), leaving out zero."""
    below = value // divisor * divisor
    return ", ".join(str(multiple) for multiple in (below, below + divisor) if multiple > 0)


def nearest_divisors(value: int, number: int) -> str:
    """The (at most two) divisors of `number` closest to `value`, as text ("4, 8")."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    nearest = sorted({*small, *(number // divisor for divisor in small)}, key=lambda divisor: abs(divisor - value))[:2]
    return ", ".join(map(str, sorted(nearest)))


class RunError(RuntimeError):
    """A run that cannot go on, through no fault of the input: a failed save, a full disk. The message is one line."""


class Diverged(RuntimeError):
    """Loss or gradient is no longer finite. The message is one line: the step, the likely cause, what is kept."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the machine or a device had no memory left. jax raises a RuntimeError: on GPUs it says the one, on CPUs
    the other."""
    said = any(words in str(error) for words in ("RESOURCE_EXHAUSTED", "Out of memory"))
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and said)
