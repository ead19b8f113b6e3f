"""What a study has found, as numbers. Every table and every picture of its report shows some of these."""

import dataclasses
from typing import Any, get_args, get_origin

from ddl_jax.command_line import attribute_docs
from ddl_jax.config.study import Budget, LearningRate
from ddl_jax.studies.results import State
from ddl_jax.studies.statistics import Interval


@dataclasses.dataclass(frozen=True)
class SweptRate:
    """One learning rate of a sweep.

    Attributes:
        learning_rate: the largest of its schedule.
        losses: final validation losses by seed, in nats per token; null where the run has none.
        states: of its runs, by seed.
        mean: of the losses; null unless all its runs have finished.
    """

    learning_rate: float
    losses: dict[int, float | None]
    states: dict[int, State]
    mean: float | None


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How an arm's learning rate was chosen: at equal tokens, with seeds that no comparison uses.

    Attributes:
        rates: that were tried, ascending.
        chosen: the one with the least mean loss; null while a run is missing, or where all diverged.
        at_edge: whether it is the smallest or largest that was tried, so that a better one may lie beyond.
    """

    rates: tuple[SweptRate, ...]
    chosen: float | None
    at_edge: bool


@dataclasses.dataclass(frozen=True)
class FirstUpdate:
    """What a sublayer does to the state before any training.

    Attributes:
        relative_update: norm of the state's change over that of the state; null if it is not finite.
        gate: mean of β; null where the arm has none.
    """

    relative_update: float | None
    gate: float | None


@dataclasses.dataclass(frozen=True)
class Initial:
    """An arm before its first step.

    Attributes:
        loss: on the first batch, in nats per token; null if it is not finite.
        sublayers: attention and MLP in turns, in order of depth.
    """

    loss: float | None
    sublayers: tuple[FirstUpdate, ...]


@dataclasses.dataclass(frozen=True)
class ArmFacts:
    """What an arm is and costs. All null where it has not been measured yet.

    Attributes:
        parameters: how many.
        width: of the model.
        flops_per_token: of training, by formula.
        step_ratio: seconds of its training step over those of the reference arm, measured in turns.
        initial: before the first step.
        tuning: of its learning rate; null where no reading asks for it.
    """

    parameters: int | None = None
    width: int | None = None
    flops_per_token: int | None = None
    step_ratio: float | None = None
    initial: Initial | None = None
    tuning: Tuning | None = None


@dataclasses.dataclass(frozen=True)
class ArmResult:
    """An arm at one reading.

    Attributes:
        steps: of each of its runs; null where it has not been measured yet.
        tokens: seen in training, by each run.
        flops: of the training, by each run, by formula.
        relative_seconds: step_ratio times steps, over those of the reference arm's budget.
        learning_rate: the largest of the schedule; null while it is not chosen.
        losses: final validation losses by seed, in nats per token; of finished runs only.
        states: of all its runs, by seed.
        mean: of the losses.
        standard_deviation: of the losses, over seeds; null with fewer than two.
        t_interval: of their mean, 95 %; null with fewer than two.
        curves: by seed, steps and validation losses after them; of finished runs only.
    """

    steps: int | None
    tokens: int | None
    flops: int | None
    relative_seconds: float | None
    learning_rate: float | None
    losses: dict[int, float]
    states: dict[int, State]
    mean: float | None
    standard_deviation: float | None
    t_interval: Interval | None
    curves: dict[int, tuple[tuple[int, float], ...]]


@dataclasses.dataclass(frozen=True)
class Difference:
    """How much more loss the first arm has than the second: below zero, the first is better.

    Attributes:
        first: an arm.
        second: the arm whose losses are subtracted.
        by_seed: differences of final validation loss, in nats per token, of seeds with which both arms finished.
        left_out: the other seeds of the reading, and why.
        n: how many differences there are.
        mean: of the differences.
        t_interval: of their mean, 95 %, Student's; null for one seed.
        bootstrap_interval: of their mean, 95 %, by resampling seeds; null for one seed, and narrow for few.
        same_sign: whether all lie on the same side of zero; null for one seed.
        standard_deviation: of the differences; null for one seed.
        unpaired_standard_deviation: what it would be if the arms' seeds had nothing in common; null for one seed.
        p: of the paired t test, two-sided; null for one seed.
        p_holm: p, adjusted for the differences of this reading (Holm).
        p_holm_study: p, adjusted for the differences of all readings of the study (Holm).
    """

    first: str
    second: str
    by_seed: dict[int, float]
    left_out: dict[int, str]
    n: int
    mean: float | None
    t_interval: Interval | None
    bootstrap_interval: Interval | None
    same_sign: bool | None
    standard_deviation: float | None
    unpaired_standard_deviation: float | None
    p: float | None
    p_holm: float | None = None
    p_holm_study: float | None = None


@dataclasses.dataclass(frozen=True)
class Noise:
    """How far the baseline's own runs lie apart, where nothing but the seed differs.

    Attributes:
        n: seeds with which the baseline finished.
        standard_deviation: of its final losses; null for fewer than two.
        detectable: by number of seeds of each arm, the difference of two arms' means that an unpaired t test at 5 %
            would find with a probability of 80 %, at this spread; null for fewer than two.
    """

    n: int
    standard_deviation: float | None
    detectable: dict[int, float] | None


@dataclasses.dataclass(frozen=True)
class ReadingResult:
    """One way to compare the arms.

    Attributes:
        name: in words.
        budget: what the arms are given the same of.
        learning_rate: `matched` or `tuned`.
        seeds: that it looks at.
        arms: by name.
        differences: in the order of the study.
        noise: of the baseline.
    """

    name: str
    budget: Budget
    learning_rate: LearningRate
    seeds: tuple[int, ...]
    arms: dict[str, ArmResult]
    differences: tuple[Difference, ...]
    noise: Noise


@dataclasses.dataclass(frozen=True)
class MissingRun:
    """A run without a final loss.

    Attributes:
        arm: its name.
        readings: that it belongs to; `tuning` for a run of the sweep.
        seed: of parameters and data order.
        steps: that it is to take; null where the arm has not been measured yet.
        learning_rate: null while it is not chosen.
        state: where it stands.
        step: the last one that was logged.
        reason: why, as far as known.
    """

    arm: str
    readings: tuple[str, ...]
    seed: int
    steps: int | None
    learning_rate: float | None
    state: State
    step: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a study has found.

    Attributes:
        question: what it asks.
        baseline: the arm that the others are compared with.
        reference: the arm whose steps are the budgets.
        steps: of the reference arm.
        tokens_per_step: of every arm.
        learning_rate: of the experiment, the matched one.
        device: on which the step times were measured.
        runs_planned: how many runs the study asks for.
        runs_finished: how many of them have a final loss.
        arms: by name.
        readings: in the order of the study.
        missing: runs without a final loss.
    """

    question: str
    baseline: str
    reference: str
    steps: int
    tokens_per_step: int
    learning_rate: float
    device: str
    runs_planned: int
    runs_finished: int
    arms: dict[str, ArmFacts]
    readings: tuple[ReadingResult, ...]
    missing: tuple[MissingRun, ...]


def document(summary: Summary) -> dict[str, Any]:
    """The summary as JSON knows it, with what every key means under "keys"."""
    return {**dataclasses.asdict(summary), "keys": key_docs(Summary)}


def key_docs(kind: type, path: str = "") -> dict[str, str]:
    """What each key means: `arms.*.width` is the width of every arm, `readings.*.name` the name of every reading."""
    found = {}
    docs = attribute_docs(kind)
    for field in dataclasses.fields(kind):
        found[f"{path}{field.name}"] = docs[field.name]
        below, star = _section(field.type)
        if below is not None:
            found |= key_docs(below, f"{path}{field.name}.{'*.' if star else ''}")
    return found


def _section(hint: Any) -> tuple[type | None, bool]:
    """The dataclass inside an annotation, and whether there are many of it."""
    if dataclasses.is_dataclass(hint):
        return hint, False
    inside = [option for option in get_args(hint) if dataclasses.is_dataclass(option)]
    return (inside[0], get_origin(hint) in (dict, tuple)) if inside else (None, False)
