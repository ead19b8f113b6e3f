"""Which runs of a study are to be made, in which order, and how long they take."""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
from pathlib import Path
from typing import NamedTuple

from ddl_jax.config import Config
from ddl_jax.config.study import StudyConfig
from ddl_jax.studies.design import Cost, PlannedRun, metrics, runs_of, tuned_rate, tuning_runs

STARTING = 5.0  # seconds until a run compiles


@dataclasses.dataclass(frozen=True)
class Shared:
    """What the runs of all arms start from: the experiment's steps and learning rate."""

    steps: int
    learning_rate: float


class Plan(NamedTuple):
    """The runs of a study, each once.

    Attributes:
        runs: in the order in which they are begun.
        open: those whose learning rate is still to be chosen, under the experiment's.
    """

    runs: list[PlannedRun]
    open: list[PlannedRun]


def plan(
    study: StudyConfig,
    shared: Shared,
    costs: Mapping[str, Cost],
    losses: Mapping[PlannedRun, float],
    arms: Collection[str],
    seeds: Collection[int],
) -> Plan:
    """The runs that the readings look at, those that choose learning rates first, the others seed by seed.

    So a study that is interrupted has as many seeds of every arm.

    Args:
        study: valid.
        shared: by the arms.
        costs: of all arms.
        losses: of finished runs; infinite for those that diverged.
        arms: for which runs are wanted.
        seeds: for which they are.
    """
    wanted = [arm for arm in study.arms if arm in arms]
    tuning = [run for reading in study.readings if reading.learning_rate == "tuned" for run in _tuning(study, shared)]
    first = [run for run in dict.fromkeys(tuning) if run.arm in wanted]
    later, undecided = [], []
    for reading in study.readings:
        for arm in wanted:
            rate: float | None = shared.learning_rate
            if reading.learning_rate == "tuned":
                rate = tuned_rate(tuning_runs(study, arm, shared.steps, shared.learning_rate), losses)
            runs = runs_of(study, reading, arm, shared.steps, rate or shared.learning_rate, costs)
            (undecided if rate is None else later).extend(run for run in runs if run.seed in seeds)
    by_seed = sorted(dict.fromkeys(later), key=lambda run: study.seeds.index(run.seed))
    return Plan([*first, *by_seed], [run for run in dict.fromkeys(undecided) if _may_come(study, shared, run, losses)])


def _tuning(study: StudyConfig, shared: Shared) -> list[PlannedRun]:
    by_arm = [tuning_runs(study, arm, shared.steps, shared.learning_rate) for arm in study.arms]
    return [run for together in zip(*by_arm, strict=True) for run in together]


def _may_come(study: StudyConfig, shared: Shared, run: PlannedRun, losses: Mapping[PlannedRun, float]) -> bool:
    """Whether the choice of a learning rate is still open, not impossible: every rate has diverged."""
    return any(tuning not in losses for tuning in tuning_runs(study, run.arm, shared.steps, shared.learning_rate))


def expected_seconds(run: PlannedRun, config: Config, measured: Mapping[str, float], done: int = 0) -> float:
    """How long a run takes by the measured times of its arm.

    Args:
        run: planned.
        config: of its arm.
        measured: its `train_step_seconds`, `forward_seconds` and `compile_seconds`.
        done: steps that it has done already.
    """
    training, left = config.training, max(0, run.steps - done)
    evaluations = -(-left // training.evaluate_every)
    steps = left * measured["train_step_seconds"]
    passes = evaluations * training.evaluation_batches * measured["forward_seconds"]
    return steps + passes + (STARTING + measured["compile_seconds"] if done == 0 else 0.0)


class Progress(NamedTuple):
    """How far a run is. Attributes: `step`, the last logged one, the `loss` there, and the newest `validation` loss."""

    step: int = 0
    loss: float | None = None
    validation: float | None = None


def progress(run_dir: Path) -> Progress:
    """How far the run in a folder is, by its metrics."""
    records = metrics(run_dir)
    if not records:
        return Progress()
    validations = [record["validation_loss"] for record in records if "validation_loss" in record]
    return Progress(records[-1]["step"], records[-1]["loss"], validations[-1] if validations else None)


def total_seconds(seconds: Sequence[float], jobs: int) -> float:
    """How long runs take, so many at a time: at least as long as the longest."""
    return max([sum(seconds) / jobs, *seconds], default=0.0)
