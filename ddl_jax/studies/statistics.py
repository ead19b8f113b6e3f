"""Statistics of a few seeds: intervals and a test for paired differences, and what could be seen at all.

Where a single seed says nothing of a spread, these functions give None.
"""

from collections.abc import Sequence
import math

import numpy as np
from scipy.special import stdtr, stdtrit

LEVEL = 0.95  # of every interval
POWER = 0.8  # with which a detectable difference would be called significant at 1 - LEVEL
RESAMPLES = 10_000  # of the bootstrap

Interval = tuple[float, float]


def mean(values: Sequence[float]) -> float | None:
    """The mean, or None of no values."""
    return float(np.mean(values)) if len(values) else None


def standard_deviation(values: Sequence[float]) -> float | None:
    """That of the population the values are drawn from (n - 1 in the denominator)."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def t_interval(values: Sequence[float]) -> Interval | None:
    """Student's interval of the mean, at `LEVEL`: right if the values are drawn from a normal distribution."""
    if len(values) < 2:
        return None
    half = stdtrit(len(values) - 1, (1 + LEVEL) / 2) * np.std(values, ddof=1) / math.sqrt(len(values))
    return float(np.mean(values) - half), float(np.mean(values) + half)


def bootstrap_interval(values: Sequence[float], seed: int = 0) -> Interval | None:
    """The percentile bootstrap's interval of the mean, at `LEVEL`: no distribution assumed, but narrow for few values.

    Of three values or fewer it is the smallest and the largest: a resample repeats the smallest n times with
    probability n**-n, at least 1/27, which is more than the 2.5 % that an interval leaves out at each end.

    Args:
        values: of the seeds.
        seed: of the resampling.
    """
    if len(values) < 2:
        return None
    draws = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    means = np.asarray(values)[draws].mean(axis=1)
    tails = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
    low, high = np.quantile(means, tails, method="inverted_cdf")
    return float(low), float(high)


def p_value(differences: Sequence[float]) -> float | None:
    """Of the paired t test, two-sided: how often differences this far from zero arise where the true mean is zero."""
    if len(differences) < 2:
        return None
    center, spread = np.mean(differences), np.std(differences, ddof=1)
    if spread == 0:
        return 1.0 if center == 0 else 0.0
    t = abs(center) / (spread / math.sqrt(len(differences)))
    return float(2 * stdtr(len(differences) - 1, -t))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """The p values adjusted for that there are several (Holm 1979, "A simple sequentially rejective multiple test
    procedure"): whoever calls those below 0.05 significant errs anywhere among them with probability at most 0.05.

    Args:
        p_values: None where there was no test; such are not counted.
    """
    tested = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(tested):
        largest = max(largest, min(1.0, p * (len(tested) - rank)))
        adjusted[index] = largest
    return adjusted


def detectable_difference(spread: float, n: int) -> float | None:
    """The difference of two arms' means that an unpaired t test would call significant with probability `POWER`.

    Args:
        spread: standard deviation over seeds, of both arms.
        n: seeds of each arm.
    """
    if n < 2:
        return None
    freedom = 2 * n - 2
    quantiles = stdtrit(freedom, (1 + LEVEL) / 2) + stdtrit(freedom, POWER)
    return float(quantiles * spread * math.sqrt(2 / n))
