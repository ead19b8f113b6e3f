"""Which runs a study makes: complete schedules for each budget, equal runs once, rates chosen before they are used."""

import math

import pytest

from ddl_jax.config.study import study_from
from ddl_jax.errors import RunError
from ddl_jax.studies.design import Cost, PlannedRun
from ddl_jax.studies.measuring import nearest_width
from ddl_jax.studies.schedule import Shared, plan, total_seconds

STUDY = study_from(
    {
        "question": "Which?",
        "run_dir": "runs/which",
        "experiments": {"tiny": "tiny.yaml"},
        "baseline": "plain",
        "reference": "delta",
        "arms": {"plain": {"model": {"residual": {"kind": "additive"}}}, "delta": {}},
        "seeds": ["0", "1"],
        "readings": [
            {"budget": "tokens", "seeds": "2"},
            {"budget": "flops", "seeds": "1"},
            {"budget": "seconds", "seeds": "1"},
            {"budget": "tokens", "seeds": "1", "learning_rate": "tuned"},
        ],
        "learning_rate_factors": ["1", "2"],
        "tuning_seeds": ["9"],
    }
)
COSTS = {"plain": Cost(0.5, 80, 10, 8), "delta": Cost(1.0, 100, 12, 8)}
SHARED = Shared(steps=100, learning_rate=0.01)


def planned(losses=None, arms=("plain", "delta"), seeds=(0, 1)):
    return plan(STUDY, SHARED, COSTS, losses or {}, arms, seeds)


def test_steps_follow_from_the_costs_and_equal_runs_are_one():
    runs = planned().runs
    assert len(set(runs)) == len(runs)
    steps = {arm: {run.steps for run in runs if run.arm == arm} for arm in COSTS}
    assert steps == {"plain": {100, 125, 200}, "delta": {100}}  # tokens; 100 / 0.8 FLOPs; 100 / 0.5 seconds
    assert [run.seed for run in runs if run.arm == "delta" and run.seed != 9] == [0, 1]


def test_rates_are_tried_first_and_then_every_arm_seed_by_seed():
    runs = planned().runs
    assert [(run.arm, run.learning_rate, run.seed) for run in runs[:4]] == [
        ("plain", 0.01, 9), ("delta", 0.01, 9), ("plain", 0.02, 9), ("delta", 0.02, 9),
    ]  # fmt: skip
    seeds = [run.seed for run in runs[4:]]
    assert seeds == sorted(seeds)
    assert {run.arm for run in runs[4:] if run.seed == 0} == set(COSTS)


def test_tuned_runs_wait_for_the_choice():
    before = planned()
    assert [run.arm for run in before.open] == ["plain", "delta"]
    losses = {run: 1.0 - run.learning_rate for run in before.runs[:4] if run.arm == "plain"}
    after = planned(losses)
    assert [run.arm for run in after.open] == ["delta"]
    assert PlannedRun("plain", 100, 0.02, 0) in after.runs and PlannedRun("plain", 100, 0.02, 0) not in before.runs


def test_an_arm_that_diverges_at_every_rate_has_no_tuned_runs():
    losses = {run: math.inf for run in planned().runs if run.seed == 9}
    assert planned(losses).open == [] and planned(losses).runs == planned().runs


def test_only_the_runs_that_are_wanted():
    assert {run.arm for run in planned(arms=("delta",)).runs} == {"delta"}
    assert {run.seed for run in planned(seeds=(1,)).runs} == {1, 9}


def test_the_time_of_all_runs():
    assert total_seconds([3.0, 3.0, 2.0], 2) == 4.0
    assert total_seconds([9.0, 1.0], 2) == 9.0


def search(seconds, base=120, unit=4):
    """Of widths whose step takes `seconds(width)` of the target's."""
    return nearest_width(lambda widths, rounds: {width: seconds(width) for width in widths}, base, unit)


@pytest.mark.parametrize("seconds, expected", [
    (lambda width: (width / 151) ** 1.3, 152),
    (lambda width: width / 1000, 1000),  # beyond the first spread
    (lambda width: width / 100, 120),  # as slow as it is
    (lambda width: width / 122.5, 124),
])  # fmt: skip
def test_the_width_whose_step_time_is_nearest(seconds, expected):
    found, tried = search(seconds)
    assert found == expected
    assert all(width % 4 == 0 for measurement in tried for width in measurement["ratios"])
    assert tried[-1]["rounds"] > tried[0]["rounds"]


def test_a_base_between_multiples_is_rounded_up():
    assert search(lambda width: width / 100, base=121, unit=4)[0] == 124


def test_a_target_that_no_width_reaches():
    with pytest.raises(RunError, match="no width up to"):
        search(lambda width: 0.1)
