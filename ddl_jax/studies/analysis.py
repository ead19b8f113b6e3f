"""From the runs of a study to its summary."""

from collections.abc import Callable
import dataclasses
import functools

from ddl_jax.config.study import Reading
from ddl_jax.studies import statistics
from ddl_jax.studies.design import PlannedRun, runs_of, tuned_rate, tuning_runs
from ddl_jax.studies.results import Outcome, StudyRecord, outcome
from ddl_jax.studies.summary import (
    ArmFacts,
    ArmResult,
    Difference,
    FirstUpdate,
    Initial,
    MissingRun,
    Noise,
    ReadingResult,
    Summary,
    SweptRate,
    Tuning,
)

SEEDS_ASKED = (3, 5, 10)  # of how many the detectable difference is told, besides as many as there are

Look = Callable[[PlannedRun], Outcome]


def summarize(record: StudyRecord) -> Summary:
    """All that a study directory says by now.

    Args:
        record: of the study; its runs are read here.
    """
    study, experiment = record.study, record.experiment
    look: Look = functools.cache(lambda run: outcome(record.folder, run))
    tuned = any(reading.learning_rate == "tuned" for reading in study.readings)
    tuning = {arm: _tuning(record, arm, look) for arm in record.costs} if tuned else {}
    missing, finished = _MissingRuns(), set()
    for arm in tuning:
        for run in _tuning_runs(record, arm):
            _account(run, "tuning", look, missing, finished)
    readings = []
    for reading in study.readings:
        arms = {}
        for arm in study.arms:
            runs = _runs(record, reading, arm, tuning)
            if runs is None:
                missing.add_unknown(arm, reading.name, study.seeds[: reading.seeds], _why_unknown(arm, tuning))
            for run in runs or ():
                _account(run, reading.name, look, missing, finished)
            arms[arm] = _arm_result(record, reading, arm, runs, look)
        readings.append(_reading_result(record, reading, arms))
    return Summary(
        question=study.question,
        baseline=study.baseline,
        reference=study.reference,
        steps=experiment.training.steps,
        tokens_per_step=record.tokens_per_step,
        learning_rate=experiment.optimizer.learning_rate,
        device=record.device,
        runs_planned=len(finished) + len(missing.found),
        runs_finished=len(finished),
        arms={arm: _facts(record, arm, tuning) for arm in study.arms},
        readings=_adjusted(readings),
        missing=tuple(missing.found.values()),
    )


class _MissingRuns:
    """Collects runs without a loss; one that several readings want is one."""

    def __init__(self):
        self.found: dict[tuple, MissingRun] = {}

    def add(self, key: tuple, run: MissingRun) -> None:
        if key in self.found:
            run = dataclasses.replace(run, readings=(*self.found[key].readings, *run.readings))
        self.found[key] = run

    def add_unknown(self, arm: str, reading: str, seeds: tuple[int, ...], reason: str) -> None:
        for seed in seeds:
            key = (arm, reading, seed)
            self.add(key, MissingRun(arm, (reading,), seed, None, None, "not begun", 0, reason))


def _account(run: PlannedRun, reading: str, look: Look, missing: _MissingRuns, finished: set[PlannedRun]) -> None:
    found = look(run)
    if found.state == "finished":
        finished.add(run)
        return
    entry = MissingRun(
        run.arm, (reading,), run.seed, run.steps, run.learning_rate, found.state, found.step, found.reason
    )
    missing.add((run,), entry)


def _why_unknown(arm: str, tuning: dict[str, Tuning]) -> str:
    if arm not in tuning:
        return "the arm is not measured yet"
    if all("diverged" in rate.states.values() for rate in tuning[arm].rates):
        return "every learning rate of its sweep diverged"
    return "its learning rate is not chosen yet"


def _tuning_runs(record: StudyRecord, arm: str) -> list[PlannedRun]:
    experiment = record.experiment
    return tuning_runs(record.study, arm, experiment.training.steps, experiment.optimizer.learning_rate)


def _tuning(record: StudyRecord, arm: str, look: Look) -> Tuning:
    runs = _tuning_runs(record, arm)
    losses = {run: look(run).loss for run in runs}
    known = {run: loss for run, loss in losses.items() if loss is not None}
    known |= {run: float("inf") for run in runs if look(run).state == "diverged"}
    rates = []
    for rate in sorted({run.learning_rate for run in runs}):
        own = [run for run in runs if run.learning_rate == rate]
        values = [losses[run] for run in own]
        rates.append(
            SweptRate(
                learning_rate=rate,
                losses={run.seed: losses[run] for run in own},
                states={run.seed: look(run).state for run in own},
                mean=None if None in values else statistics.mean(values),
            )
        )
    chosen = tuned_rate(runs, known)
    edges = (rates[0].learning_rate, rates[-1].learning_rate)
    return Tuning(tuple(rates), chosen, at_edge=chosen in edges)


def _runs(record: StudyRecord, reading: Reading, arm: str, tuning: dict[str, Tuning]) -> list[PlannedRun] | None:
    """The runs that a reading looks at, or None while it is open which they are."""
    if arm not in record.costs:
        return None
    rate = record.experiment.optimizer.learning_rate if reading.learning_rate == "matched" else tuning[arm].chosen
    if rate is None:
        return None
    return runs_of(record.study, reading, arm, record.experiment.training.steps, rate, record.costs)


def _arm_result(
    record: StudyRecord, reading: Reading, arm: str, runs: list[PlannedRun] | None, look: Look
) -> ArmResult:
    if runs is None:
        states = dict.fromkeys(record.study.seeds[: reading.seeds], "not begun")
        return ArmResult(None, None, None, None, None, {}, states, None, None, None, {})
    outcomes = {run.seed: look(run) for run in runs}
    finished = {seed: found for seed, found in outcomes.items() if found.state == "finished"}
    losses = {seed: found.loss for seed, found in finished.items()}
    values, steps, cost = list(losses.values()), runs[0].steps, record.costs[arm]
    reference = record.costs[record.study.reference]
    tokens = steps * record.tokens_per_step
    return ArmResult(
        steps=steps,
        tokens=tokens,
        flops=tokens * cost.flops_per_token,
        relative_seconds=steps * cost.step_ratio / (record.experiment.training.steps * reference.step_ratio),
        learning_rate=runs[0].learning_rate,
        losses=losses,
        states={seed: found.state for seed, found in outcomes.items()},
        mean=statistics.mean(values),
        standard_deviation=statistics.standard_deviation(values),
        t_interval=statistics.t_interval(values),
        curves={seed: found.curve for seed, found in finished.items()},
    )


def _reading_result(record: StudyRecord, reading: Reading, arms: dict[str, ArmResult]) -> ReadingResult:
    seeds = record.study.seeds[: reading.seeds]
    return ReadingResult(
        name=reading.name,
        budget=reading.budget,
        learning_rate=reading.learning_rate,
        seeds=seeds,
        arms=arms,
        differences=tuple(_difference(first, second, arms, seeds) for first, second in record.study.pairs()),
        noise=_noise(arms[record.study.baseline], reading.seeds),
    )


def _difference(first: str, second: str, arms: dict[str, ArmResult], seeds: tuple[int, ...]) -> Difference:
    losses = [arms[name].losses for name in (first, second)]
    both = [seed for seed in seeds if all(seed in found for found in losses)]
    by_seed = {seed: losses[0][seed] - losses[1][seed] for seed in both}
    values = list(by_seed.values())
    spreads = [statistics.standard_deviation([found[seed] for seed in both]) for found in losses]
    return Difference(
        first=first,
        second=second,
        by_seed=by_seed,
        left_out={seed: _why_left_out(seed, first, second, arms) for seed in seeds if seed not in both},
        n=len(values),
        mean=statistics.mean(values),
        t_interval=statistics.t_interval(values),
        bootstrap_interval=statistics.bootstrap_interval(values),
        same_sign=None if len(values) < 2 else min(values) > 0 or max(values) < 0,
        standard_deviation=statistics.standard_deviation(values),
        unpaired_standard_deviation=None if None in spreads else sum(spread**2 for spread in spreads) ** 0.5,
        p=statistics.p_value(values),
    )


def _why_left_out(seed: int, first: str, second: str, arms: dict[str, ArmResult]) -> str:
    states = {name: arms[name].states[seed] for name in (first, second)}
    return ", ".join(f"{name} {state}" for name, state in states.items() if state != "finished")


def _noise(baseline: ArmResult, seeds: int) -> Noise:
    spread = baseline.standard_deviation
    asked = sorted({seeds, *SEEDS_ASKED} - {1})
    detectable = None if spread is None else {n: statistics.detectable_difference(spread, n) for n in asked}
    return Noise(len(baseline.losses), spread, detectable)


def _adjusted(readings: list[ReadingResult]) -> tuple[ReadingResult, ...]:
    """The same with p values adjusted for that several differences are looked at."""
    study = iter(statistics.holm([one.p for reading in readings for one in reading.differences]))
    adjusted = []
    for reading in readings:
        own = statistics.holm([one.p for one in reading.differences])
        differences = [
            dataclasses.replace(one, p_holm=here, p_holm_study=next(study))
            for one, here in zip(reading.differences, own, strict=True)
        ]
        adjusted.append(dataclasses.replace(reading, differences=tuple(differences)))
    return tuple(adjusted)


def _facts(record: StudyRecord, arm: str, tuning: dict[str, Tuning]) -> ArmFacts:
    if arm not in record.costs:
        return ArmFacts()
    cost, initial = record.costs[arm], None
    if arm in record.initial:
        found = record.initial[arm]
        updates = tuple(FirstUpdate(one["relative_update"], one["gate"]) for one in found["sublayers"])
        initial = Initial(found["loss"], updates)
    return ArmFacts(
        parameters=cost.parameters,
        width=cost.width,
        flops_per_token=cost.flops_per_token,
        step_ratio=cost.step_ratio,
        initial=initial,
        tuning=tuning.get(arm),
    )
