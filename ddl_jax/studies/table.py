"""What a person sees of a study that runs: a live table on a terminal, plain lines elsewhere."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from ddl_jax.config.study import StudyConfig
from ddl_jax.duration import duration
from ddl_jax.studies.design import PlannedRun
from ddl_jax.studies.schedule import Progress

STYLES = {"running": "cyan", "done": "green", "failed": "red", "diverged": "red", "waiting": "dim"}


class Row(NamedTuple):
    """A run as the table shows it. Attributes: `run`, its `state`, its `progress`, and the seconds `left`, if known."""

    run: PlannedRun
    state: str
    progress: Progress
    left: float | None = None


def said(run: PlannedRun) -> str:
    """The run in a line: "delta, seed 0, 1200 steps at 0.004"."""
    return f"{run.arm}, seed {run.seed}, {run.steps} steps at {run.learning_rate:g}"


def loss(value: float | None) -> str:
    """A loss as the table shows it."""
    return "" if value is None else f"{value:.3f}"


class Display:
    """Shows the runs of a study. For a `with` statement.

    Args:
        question: that the study asks.
        console: on a terminal it shows a live table, elsewhere lines.
    """

    def __init__(self, question: str, console: Console):
        self._question, self._console = question, console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._validations: dict[PlannedRun, float | None] = {}

    def __enter__(self) -> "Display":
        if self._live:
            self._live.__enter__()
        return self

    def __exit__(self, *error) -> None:
        if self._live:
            self._live.__exit__(*error)

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(self, rows: Sequence[Row], summary: str) -> None:
        """Shows how far the runs are.

        Args:
            rows: all runs, in the order of the plan.
            summary: the line below them.
        """
        if self._live:
            self._live.update(self._table(rows, summary), refresh=True)
            return
        for row in rows:
            validation = row.progress.validation
            if row.state == "running" and self._validations.get(row.run) != validation:
                self._validations[row.run] = validation
                left = "" if row.left is None else f", {duration(row.left)} left"
                where = f"step {row.progress.step}/{row.run.steps}"
                self.say(f"{said(row.run)}: {where}, validation {loss(validation)}{left}")

    def _table(self, rows: Sequence[Row], summary: str) -> Group:
        right = ("seed", "rate", "step", "loss", "validation")
        table = Table(
            "arm", *(Column(name, justify="right") for name in right), "state", Column("left", justify="right"),
            box=None, pad_edge=False, title=Text(self._question, style="bold"), title_justify="left",
        )  # fmt: skip
        visible = shown_rows(rows, max(3, self._console.height - 5))
        for row in visible:
            run, progress = row.run, row.progress
            table.add_row(
                run.arm,
                f"{run.seed}",
                f"{run.learning_rate:g}",
                f"{progress.step}/{run.steps}",
                loss(progress.loss),
                loss(progress.validation),
                Text(row.state, style=STYLES[row.state]),
                "" if row.left is None else duration(row.left),
            )
        hidden = len(rows) - len(visible)
        more = f"\n({hidden} more runs are not shown)" if hidden else ""
        return Group(table, Text(f"{summary}{more}"))


def shown_rows(rows: Sequence[Row], most: int) -> list[Row]:
    """The rows that fit, in their order: those that run, then those that failed, the next ones, the newest done."""
    if len(rows) <= most:
        return list(rows)
    ranks: Mapping[str, int] = {"running": 0, "failed": 1, "diverged": 1, "waiting": 2, "done": 2}
    running = [place for place, row in enumerate(rows) if row.state == "running"]
    middle = max(running, default=next((i for i, row in enumerate(rows) if row.state == "waiting"), len(rows)))
    nearest = sorted(range(len(rows)), key=lambda place: (ranks[rows[place].state], abs(place - middle)))
    return [rows[place] for place in sorted(nearest[:most])]


def show_plan(study: StudyConfig, arms: Collection[str], console: Console, rows: Sequence[Row] | None = None) -> None:
    """Prints what a study would run.

    Args:
        study: valid.
        arms: for which runs are wanted.
        console: where to.
        rows: its runs, or None where steps are not known yet.
    """
    console.print(study.question, style="bold", markup=False)
    if rows is None:
        for reading in study.readings:
            console.print(f"{reading.name}: {len(arms)} arms × {reading.seeds} seeds")
        console.print(
            "Nothing is measured yet: the first start times the arms, and from that follow the steps of each at equal "
            "seconds, which runs are the same in several readings, and how long all will take.",
            soft_wrap=True,
        )
        return
    right = [Column(name, justify="right") for name in ("steps", "rate", "seeds", "done", "time left")]
    table = Table("arm", *right, box=None, pad_edge=False)
    for arm in study.arms:
        own = [row for row in rows if row.run.arm == arm]
        for steps, rate in sorted({(row.run.steps, row.run.learning_rate) for row in own}):
            same = [row for row in own if (row.run.steps, row.run.learning_rate) == (steps, rate)]
            left = sum(row.left or 0.0 for row in same)
            seeds = " ".join(f"{row.run.seed}" for row in same)
            done = sum(row.state == "done" for row in same)
            table.add_row(arm, f"{steps}", f"{rate:g}", seeds, f"{done}", duration(left) if left else "")
    console.print(table)
