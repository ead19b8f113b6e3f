"""Statistics of a few seeds, against values from tables, from other code, and by counting every case."""

import itertools

import numpy as np
import pytest
from scipy import stats

from ddl_jax.studies import statistics

VALUES = [-0.031, -0.012, -0.024, -0.005, -0.018]


def test_the_t_interval_is_that_of_the_tables():
    # Half-width t(0.975; 2) s / sqrt(3), with t = 4.303 from the usual table, s = 1, mean = 2.
    low, high = statistics.t_interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5), abs=1e-3)
    wanted = stats.t.interval(0.95, 4, loc=np.mean(VALUES), scale=stats.sem(VALUES))
    assert statistics.t_interval(VALUES) == pytest.approx(wanted, rel=1e-9)


def test_p_is_that_of_the_paired_t_test():
    first, second = np.array([3.1, 2.9, 3.3, 3.0]), np.array([3.0, 2.95, 3.1, 2.8])
    assert statistics.p_value(list(first - second)) == pytest.approx(stats.ttest_rel(first, second).pvalue, rel=1e-9)
    assert statistics.p_value([0.0, 0.0]) == 1 and statistics.p_value([0.5, 0.5]) == 0


def test_the_bootstrap_of_three_goes_from_the_smallest_to_the_largest():
    assert statistics.bootstrap_interval([0.3, 0.1, 0.2]) == pytest.approx((0.1, 0.3))


def test_the_bootstrap_is_near_that_of_all_resamples():
    means = np.sort([np.mean(draw) for draw in itertools.product(VALUES, repeat=len(VALUES))])
    wanted = means[int(0.025 * len(means))], means[int(0.975 * len(means))]
    # 10,000 draws place a 2.5 % quantile within about 0.3 % of the distribution.
    slack = means[int(0.03 * len(means))] - means[int(0.02 * len(means))]
    found = statistics.bootstrap_interval(VALUES)
    assert found == pytest.approx(wanted, abs=slack)
    assert found == statistics.bootstrap_interval(VALUES) != statistics.bootstrap_interval(VALUES, seed=1)


@pytest.mark.parametrize(("seeds", "said"), [(3, 0.76), (5, 0.84)])
def test_the_bootstrap_is_as_narrow_as_the_report_says(seeds, said):
    draws = np.random.default_rng(0).normal(size=(400, seeds))
    held = [low <= 0 <= high for low, high in map(statistics.bootstrap_interval, draws)]
    assert np.mean(held) == pytest.approx(said, abs=3 * (said * (1 - said) / 400) ** 0.5)


def test_one_seed_gives_no_spread():
    for of in ("t_interval", "bootstrap_interval", "p_value", "standard_deviation"):
        assert getattr(statistics, of)([0.1]) is None
    assert statistics.mean([0.1]) == 0.1 and statistics.mean([]) is None


def test_holm_by_hand():
    # Sorted: 0.01 · 3, 0.02 · 2, 0.03 · 1, which may not be below the one before it.
    assert statistics.holm([0.03, None, 0.01, 0.02]) == pytest.approx([0.04, None, 0.03, 0.04])
    assert statistics.holm([0.6, 0.7]) == [1.0, 1.0]


def test_the_detectable_difference_is_detected_as_often_as_said():
    spread, n = 0.02, 5
    difference = statistics.detectable_difference(spread, n)
    draws = np.random.default_rng(0).normal(size=(2, 4000, n)) * spread
    found = stats.ttest_ind(draws[0] + difference, draws[1], axis=1).pvalue < 0.05
    assert found.mean() == pytest.approx(statistics.POWER, abs=0.03)
    assert statistics.detectable_difference(spread, 1) is None
