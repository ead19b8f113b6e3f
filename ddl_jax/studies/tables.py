"""The tables of a study's report, each from its summary; as Markdown too."""

from collections.abc import Sequence
import statistics

from ddl_jax.studies.page import Table
from ddl_jax.studies.statistics import Interval
from ddl_jax.studies.summary import Difference, ReadingResult, Summary

NONE = "–"  # where there is no number


def markdown(table: Table) -> str:
    """The table in Markdown, its first column to the left and the others to the right."""

    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = "|:--|" + "--:|" * (len(table.header) - 1)
    return "\n".join([row(table.header), rule, *map(row, table.rows)])


def differences(reading: ReadingResult) -> Table:
    """Mean differences of a reading with their intervals and p values."""
    header = ("A − B", "seeds", "mean", "95 % t interval", "95 % bootstrap", "same sign", "p",
              "p (Holm)", "p (Holm, whole study)")  # fmt: skip
    rows = []
    for one in reading.differences:
        few = {0: NONE, 1: "1 seed"}.get(one.n, NONE)
        rows.append(
            (
                name(one),
                f"{one.n} of {len(reading.seeds)}",
                signed(one.mean),
                interval(one.t_interval, few),
                interval(one.bootstrap_interval, few),
                {None: few, True: "yes", False: "no"}[one.same_sign],
                probability(one.p, few),
                probability(one.p_holm, few),
                probability(one.p_holm_study, few),
            )
        )
    return Table(header, rows)


def differences_by_seed(reading: ReadingResult) -> Table:
    """Each seed's difference; where there is none, why."""
    rows = []
    for one in reading.differences:
        cells = {seed: signed(value) for seed, value in one.by_seed.items()} | one.left_out
        rows.append((name(one), *(cells[seed] for seed in reading.seeds)))
    return Table(("A − B", *(f"seed {seed}" for seed in reading.seeds)), rows)


def arms(reading: ReadingResult) -> Table:
    """What the arms came to at a reading, and what they used."""
    header = ("arm", "mean loss", "standard deviation", *(f"seed {seed}" for seed in reading.seeds), "steps", "tokens",
              "FLOPs", "relative seconds", "learning rate")  # fmt: skip
    rows = []
    for arm, found in reading.arms.items():
        few = {0: NONE, 1: "1 seed"}.get(len(found.losses), NONE)
        by_seed = [loss(found.losses[s]) if s in found.losses else found.states[s] for s in reading.seeds]
        used = (count(found.steps), count(found.tokens), large(found.flops), ratio(found.relative_seconds))
        spread = loss(found.standard_deviation, few)
        partial = f" (of {len(found.losses)})" if 0 < len(found.losses) < len(reading.seeds) else ""
        rows.append((arm, loss(found.mean) + partial, spread, *by_seed, *used, rate(found.learning_rate)))
    return Table(header, rows)


def costs(summary: Summary) -> Table:
    """What the arms are and cost."""
    header = ("arm", "parameters", "width", "FLOPs per token", "step time, relative")
    rows = [
        (arm, count(f.parameters), count(f.width), large(f.flops_per_token), ratio(f.step_ratio))
        for arm, f in summary.arms.items()
    ]
    return Table(header, rows)


def noise(summary: Summary) -> Table:
    """The spread of the baseline at each reading, and what could be seen at that spread without pairs."""
    asked = sorted({n for reading in summary.readings for n in reading.noise.detectable or ()})
    rows = []
    for reading in summary.readings:
        found = reading.noise
        few = {0: NONE, 1: "1 seed"}.get(found.n, NONE)
        seen = found.detectable or {}
        cells = [loss(seen[n]) if n in seen else NONE for n in asked]
        rows.append((reading.name, str(found.n), loss(found.standard_deviation, few), *cells))
    return Table(("reading", "seeds", "standard deviation", *(f"seen with {n} seeds" for n in asked)), rows)


def pairing(summary: Summary) -> Table:
    """What comparing seed by seed is worth: the spread of paired differences beside that of unpaired ones."""
    rows = []
    for reading in summary.readings:
        for one in reading.differences:
            if one.standard_deviation is not None:
                spreads = loss(one.standard_deviation), loss(one.unpaired_standard_deviation)
                rows.append((name(one), reading.name, str(one.n), *spreads))
    return Table(("A − B", "reading", "seeds", "paired", "unpaired"), rows)


def tuning(summary: Summary) -> Table:
    """The sweeps of the learning rate; the chosen rate's loss is marked."""
    swept = {arm: facts.tuning for arm, facts in summary.arms.items() if facts.tuning is not None}
    rates = sorted({one.learning_rate for found in swept.values() for one in found.rates})
    rows = []
    for arm, found in swept.items():
        cells = {}
        for one in found.rates:
            unfinished = [state for state in one.states.values() if state != "finished"]
            mark = " (chosen)" if one.learning_rate == found.chosen else ""
            cells[one.learning_rate] = (unfinished[0] if unfinished else loss(one.mean)) + mark
        edge = {None: "", False: "no", True: "yes"}[found.at_edge if found.chosen is not None else None]
        rows.append((arm, *(cells.get(one, NONE) for one in rates), rate(found.chosen), edge))
    return Table(("arm", *(f"at {rate(one)}" for one in rates), "chosen", "at the edge"), rows)


def initial(summary: Summary) -> Table:
    """The arms before training: loss, and how much each sublayer changes the state."""
    header = ("arm", "loss", "first sublayer", "smallest", "median", "largest", "last sublayer", "gate")
    rows = []
    for arm, facts in summary.arms.items():
        if facts.initial is not None and facts.initial.sublayers:
            updates = [one.relative_update for one in facts.initial.sublayers]
            finite = [update for update in updates if update is not None]
            between = (min(finite), statistics.median(finite), max(finite)) if finite else (None, None, None)
            shown = (updates[0], *between, updates[-1])
            gates = [one.gate for one in facts.initial.sublayers if one.gate is not None]
            cells = [ratio(value) for value in (*shown, statistics.mean(gates) if gates else None)]
            rows.append((arm, loss(facts.initial.loss), *cells))
    return Table(header, rows)


def missing(summary: Summary) -> Table:
    """The runs without a final loss: what failed first, then what is not done yet. Seeds of a kind share a row."""
    order = ("diverged", "failed", "half-done", "not begun")
    seeds: dict[tuple[str, ...], list[str]] = {}
    for run in sorted(summary.missing, key=lambda run: order.index(run.state)):
        far = "" if run.steps is None else f"{run.step:,} of {run.steps:,}"
        row = (run.arm, run.state, far, rate(run.learning_rate), "; ".join(run.readings), run.reason)
        seeds.setdefault(row, []).append(str(run.seed))
    rows = [(*row[:2], ", ".join(found), *row[2:]) for row, found in seeds.items()]
    return Table(("arm", "state", "seeds", "steps", "learning rate", "for", "reason"), rows)


def name(difference: Difference) -> str:
    """As in "delta − additive"."""
    return f"{difference.first} − {difference.second}"


def signed(value: float | None, none: str = NONE) -> str:
    """A difference of losses in nats per token."""
    return none if value is None else f"{value:+.4f}".replace("-", "−")


def loss(value: float | None, none: str = NONE) -> str:
    """A loss in nats per token."""
    return none if value is None else f"{value:.4f}"


def interval(bounds: Interval | None, none: str = NONE) -> str:
    """As in "−0.0210 … −0.0102"."""
    return none if bounds is None else f"{signed(bounds[0])} … {signed(bounds[1])}"


def probability(value: float | None, none: str = NONE) -> str:
    """A p value."""
    return none if value is None else "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def count(value: int | None) -> str:
    """As in "1,228,800"."""
    return NONE if value is None else f"{value:,}"


def large(value: float | None) -> str:
    """As in "1.23e+13"."""
    return NONE if value is None else f"{value:.3g}"


def ratio(value: float | None) -> str:
    """As in "0.874"."""
    return NONE if value is None else f"{value:.3f}"


def rate(value: float | None) -> str:
    """A learning rate."""
    return NONE if value is None else f"{value:g}"
