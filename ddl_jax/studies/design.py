"""The runs of a study: which arm trains for how many steps, with which learning rate and seed, and in which folder.

DIR/study.json                            the study and the settings that its arms share
DIR/measured.json                         what the arms cost, measured once, from which follow the steps of each
DIR/arms/ARM.yaml                         the configuration of each, but for what differs from run to run
DIR/initial.json                          how large the arms' first updates are
DIR/runs/ARM/steps1200_lr0.004_seed0/     a run directory, as train.py leaves it
DIR/runs/ARM/steps1200_lr0.004_seed0.log  what that run printed
DIR/runs/ARM/steps1200_lr0.004_seed0.failed.json   if it failed: exit code (or minus a signal), message
"""

from collections.abc import Mapping
import dataclasses
import json
import math
from pathlib import Path

from ddl_jax.config.study import Budget, Reading, StudyConfig


@dataclasses.dataclass(frozen=True)
class Cost:
    """What an arm costs.

    Attributes:
        step_ratio: its training step's seconds over those of the reference arm, measured in turns.
        flops_per_token: of training, by formula.
        parameters: how many.
        width: of the model.
    """

    step_ratio: float
    flops_per_token: int
    parameters: int
    width: int


@dataclasses.dataclass(frozen=True, order=True)
class PlannedRun:
    """One training run of an arm, with a complete schedule over its own steps."""

    arm: str
    steps: int
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        """Of its folder, below that of the arm."""
        return f"steps{self.steps}_lr{self.learning_rate:g}_seed{self.seed}"

    def folder(self, study_dir: Path) -> Path:
        """Its run directory."""
        return study_dir / "runs" / self.arm / self.name

    def beside(self, study_dir: Path, ending: str) -> Path:
        """A file next to its run directory: `log` is what it printed, `failed.json` how it failed."""
        return self.folder(study_dir).with_name(f"{self.name}.{ending}")


def steps_for(budget: Budget, steps: int, cost: Cost, reference: Cost) -> int:
    """How many steps of an arm use what the reference arm uses in `steps`; at least 1.

    Batches hold equally many tokens, so that equal tokens are equal steps.
    """
    share = {
        "tokens": 1.0,
        "flops": reference.flops_per_token / cost.flops_per_token,
        "seconds": reference.step_ratio / cost.step_ratio,
    }
    return max(1, round(steps * share[budget]))


def tuning_runs(study: StudyConfig, arm: str, steps: int, learning_rate: float) -> list[PlannedRun]:
    """The runs among which an arm's learning rate is chosen: equal tokens, seeds of their own."""
    return [
        PlannedRun(arm, steps, learning_rate * factor, seed)
        for factor in study.learning_rate_factors
        for seed in study.tuning_seeds
    ]


def tuned_rate(runs: list[PlannedRun], losses: Mapping[PlannedRun, float]) -> float | None:
    """The learning rate with the least mean validation loss, or None while one of the runs has no result.

    Args:
        runs: of `tuning_runs`.
        losses: of finished runs; infinite for one that diverged.
    """
    if any(run not in losses for run in runs):
        return None
    rates = sorted({run.learning_rate for run in runs})
    means = {rate: _mean([losses[run] for run in runs if run.learning_rate == rate]) for rate in rates}
    best = min(rates, key=means.__getitem__)
    return best if math.isfinite(means[best]) else None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def runs_of(
    study: StudyConfig, reading: Reading, arm: str, steps: int, learning_rate: float, costs: Mapping[str, Cost]
) -> list[PlannedRun]:
    """The runs of an arm that a reading looks at, one for each of its seeds.

    Args:
        study: valid.
        reading: one of the study's.
        arm: its name.
        steps: `training.steps` of the experiment: the reference arm's.
        learning_rate: the experiment's, or the arm's tuned one.
        costs: of all arms.
    """
    own = steps_for(reading.budget, steps, costs[arm], costs[study.reference])
    return [PlannedRun(arm, own, learning_rate, seed) for seed in study.seeds[: reading.seeds]]


def final_loss(run_dir: Path, steps: int) -> float | None:
    """The validation loss after a run's last step, in nats per token; None if it has not come to it."""
    for record in reversed(metrics(run_dir)):
        if record["step"] == steps and "validation_loss" in record:
            return record["validation_loss"]
    return None


def metrics(run_dir: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl, but for one that a crash cut short."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
