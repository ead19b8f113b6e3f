"""The pictures of a study's report, from its summary alone (the extra `plots`)."""

from collections.abc import Mapping, Sequence
import io
from typing import TYPE_CHECKING

import numpy as np
from scipy.interpolate import PchipInterpolator

from ddl_jax.config.study import Budget
from ddl_jax.studies import tables
from ddl_jax.studies.summary import ArmResult, ReadingResult, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours that can be told apart on white, with whatever eyes; the baseline is grey. Markers tell too.
BASELINE = "#6B6B6B"
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
INK, PALE = "#222222", "#BBBBBB"
AXES: Mapping[Budget, str] = {
    "tokens": "tokens seen in training",
    "flops": "FLOPs of training",
    "seconds": "seconds of training, relative to the reference arm's budget",
}
SHOWN_FROM = 0.3  # of the budget: what lies before is so high that the arms could not be told apart
WIDTH = 7.5  # inches

Points = tuple[np.ndarray, np.ndarray]


def pictures(summary: Summary) -> dict[str, bytes]:
    """Every picture for which there is something to show.

    Returns:
        PNG files by name: `differences`, `frontier`, and `loss_READING` for each reading; `loss_BUDGET` from the runs
        at equal tokens where no reading has that budget.
    """
    found = {"differences": differences_figure(summary), "frontier": frontier_figure(summary)}
    for name, (reading, budget) in curves(summary).items():
        found[name] = loss_figure(summary, reading, budget)
    return {name: png(figure) for name, figure in found.items() if figure is not None}


def curves(summary: Summary) -> dict[str, tuple[ReadingResult, Budget]]:
    """For each picture of losses in the course of training, its runs and what they are drawn against."""
    found: dict[str, tuple[ReadingResult, Budget]] = {}
    for reading in summary.readings:
        tuned = "_tuned" if reading.learning_rate == "tuned" else ""
        found[f"loss_{reading.budget}{tuned}"] = (reading, reading.budget)
    tokens = [reading for reading in summary.readings if reading.budget == "tokens"]
    for budget in AXES if tokens else ():
        if not any(reading.budget == budget for reading in summary.readings):
            found[f"loss_{budget}"] = (tokens[0], budget)
    return found


def png(figure: "Figure") -> bytes:
    """The figure as a PNG file of few colours, a quarter of the size; the same bytes whenever it is the same figure."""
    from PIL import Image

    drawn, file = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(file, format="png", optimize=True)
    return file.getvalue()


def _figure(rows: int, height: float, **kwargs) -> "tuple[Figure, Sequence[Axes]]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), dpi=130, facecolor="white", layout="constrained")
    axes = figure.subplots(rows, 1, squeeze=False, **kwargs)[:, 0]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(color="#EEEEEE", linewidth=0.8)
        one.set_axisbelow(True)
    return figure, axes


def _looks(summary: Summary) -> dict[str, dict]:
    """Colour and marker of each arm, the same in every picture."""
    others = [arm for arm in summary.arms if arm != summary.baseline]
    looks = {summary.baseline: {"color": BASELINE, "marker": "o"}}
    for i, arm in enumerate(others):
        looks[arm] = {"color": COLORS[i % len(COLORS)], "marker": MARKERS[(i + 1) % len(MARKERS)]}
    return looks


def _legend(figure: "Figure", looks: Mapping[str, dict], arms: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], linewidth=2, markersize=6, label=arm, **looks[arm]) for arm in arms]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 4), frameon=False)


def loss_figure(summary: Summary, reading: ReadingResult, budget: Budget) -> "Figure | None":
    """Validation loss in the course of training, and below it the difference to the baseline, seed by seed.

    Args:
        summary: that the reading is of.
        reading: whose runs are drawn.
        budget: what they are drawn against.

    Returns:
        The figure: thin lines are seeds, thick ones means; None while no run has finished.
    """
    from matplotlib.ticker import EngFormatter

    per_step = {arm: _per_step(summary, arm, budget) for arm in reading.arms if reading.arms[arm].curves}
    if not per_step:
        return None
    looks = _looks(summary)
    lines = {arm: _lines(reading.arms[arm], scale) for arm, scale in per_step.items()}
    base = lines.get(summary.baseline, {})
    paired = {
        arm: [_minus(line, base[seed]) for seed, line in by_seed.items() if seed in base]
        for arm, by_seed in lines.items()
        if arm != summary.baseline
    }
    pairs = any(paired.values())
    figure, panels = _figure(2, 8.2, sharex=True) if pairs else _figure(1, 4.6)
    shown = [{arm: list(by_seed.values()) for arm, by_seed in lines.items()}, paired]
    end = max(x[-1] for by_seed in lines.values() for x, _ in by_seed.values())
    for axes, by_arm in zip(panels, shown, strict=False):
        for arm, found in by_arm.items():
            _draw(axes, found, looks[arm])
        _zoom(axes, [line for found in by_arm.values() for line in found], SHOWN_FROM * end, end)
    panels[0].set_ylabel("validation loss, nats per token")
    if pairs:
        panels[1].axhline(0, color=BASELINE, linewidth=1.5, zorder=1)
        panels[1].set_ylabel(f"loss minus that of {summary.baseline},\nsame seed")
    panels[-1].set_xlabel(AXES[budget])
    if budget != "seconds":
        panels[-1].xaxis.set_major_formatter(EngFormatter())
    panels[0].set_title(f"{reading.name}: thin lines are seeds, thick ones their means", fontsize=10, color=INK)
    _legend(figure, looks, list(lines))
    return figure


def _per_step(summary: Summary, arm: str, budget: Budget) -> float:
    """What one step of an arm uses of a budget."""
    facts, reference = summary.arms[arm], summary.arms[summary.reference]
    if budget == "tokens":
        return summary.tokens_per_step
    if budget == "flops":
        return summary.tokens_per_step * facts.flops_per_token
    return facts.step_ratio / (summary.steps * reference.step_ratio)


def _lines(result: ArmResult, scale: float) -> dict[int, Points]:
    arrays = {seed: np.array(curve, float).T for seed, curve in result.curves.items()}
    return {seed: (steps * scale, losses) for seed, (steps, losses) in arrays.items()}


def _minus(line: Points, base: Points) -> Points:
    """A curve minus another one. Where they were evaluated at different places, the other is interpolated in the
    logarithm of x, in which loss is nearly straight; at the ends of equal budgets, which rounding to whole steps has
    moved by less than one, nothing is extrapolated."""
    (x, y), (base_x, base_y) = line, base
    inside = x >= base_x[0] * (1 - 1e-9)
    x, y = x[inside], y[inside]
    if len(base_x) == 1:
        return x, y - base_y[0]
    at = np.minimum(x, base_x[-1])
    return x, y - PchipInterpolator(np.log(base_x), base_y)(np.log(np.maximum(at, base_x[0])))


def _draw(axes: "Axes", lines: list[Points], look: dict) -> None:
    """Thin lines, and their thick mean where all have a point."""
    if not lines:
        return
    for x, y in lines:
        axes.plot(x, y, color=look["color"], linewidth=0.7, alpha=0.55)
    shared = sorted(set.intersection(*(set(x) for x, _ in lines)))
    mean = [float(np.mean([y[x == at][0] for x, y in lines])) for at in shared]
    axes.plot(shared, mean, color=look["color"], marker=look["marker"], markersize=5, linewidth=2.2)


def _zoom(axes: "Axes", lines: list[Points], start: float, end: float) -> None:
    late = np.concatenate([y[x >= start] for x, y in lines]) if lines else np.zeros(0)
    axes.set_xlim(start - 0.02 * end, end * 1.02)
    if len(late):
        margin = 0.06 * (late.max() - late.min()) + 1e-4
        axes.set_ylim(late.min() - margin, late.max() + margin)


def frontier_figure(summary: Summary) -> "Figure | None":
    """Final loss against the time of a training step, and below it the paired difference to the baseline.

    Returns:
        The figure: filled marks at equal tokens, hollow ones at equal seconds, with 95 % t intervals where there are
        two seeds; None while no run at equal tokens has finished.
    """
    matched = {one.budget: one for one in summary.readings if one.learning_rate == "matched"}
    shown = [(matched[budget], budget == "tokens") for budget in ("tokens", "seconds") if budget in matched]
    points = [
        (arm, summary.arms[arm].step_ratio, result, filled)
        for reading, filled in shown
        for arm, result in reading.arms.items()
        if result.mean is not None
    ]
    if not any(filled for *_, filled in points):
        return None
    looks = _looks(summary)
    times = [x for _, x, _, _ in points]
    aside = 0.012 * (max(times) - min(times))  # for hollow marks, whose intervals would lie on those of filled ones
    pairs = [
        (one.first, summary.arms[one.first].step_ratio, one, filled)
        for reading, filled in shown
        for one in reading.differences
        if one.second == summary.baseline and one.n
    ]
    figure, panels = _figure(2, 8.2, sharex=True) if pairs else _figure(1, 4.6)
    for axes, marks in zip(panels, (points, pairs), strict=False):
        for arm, x, found, filled in marks:
            _mark(axes, x if filled else x + aside, found.mean, found.t_interval, looks[arm], filled)
        axes.margins(0.08)
    corners = _front([(x, result.mean) for _, x, result, filled in points if filled])
    panels[0].step(*corners, where="post", color=PALE, zorder=0)
    panels[0].set_ylabel("final validation loss, nats per token")
    panels[0].set_title("filled: equal tokens; hollow: equal seconds; bars: 95 % t intervals", fontsize=10, color=INK)
    if pairs:
        panels[1].axhline(0, color=BASELINE, linewidth=1.5, zorder=1)
        panels[1].plot(summary.arms[summary.baseline].step_ratio, 0, markersize=7, **looks[summary.baseline])
        panels[1].set_ylabel(f"final loss minus that of {summary.baseline},\nsame seed")
    panels[-1].set_xlabel(f"time of a training step, relative to {summary.reference}'s")
    _legend(figure, looks, [arm for arm in summary.arms if arm in {point[0] for point in points}])
    return figure


def _mark(axes: "Axes", x: float, y: float, bounds: tuple[float, float] | None, look: dict, filled: bool) -> None:
    face = look["color"] if filled else "white"
    if bounds is not None:
        axes.plot([x, x], bounds, color=look["color"], linewidth=1.8 if filled else 1.0, alpha=0.8, zorder=2)
    axes.plot(x, y, linestyle="none", markersize=7, markerfacecolor=face, zorder=3 if filled else 4, **look)


def _front(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """The corners of the frontier: what no other arm beats at once in time and in loss."""
    corners: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not corners or y < corners[-1][1]:
            corners.append((x, y))
    return [x for x, _ in corners], [y for _, y in corners]


def differences_figure(summary: Summary) -> "Figure | None":
    """Paired differences of final loss, one panel for each reading.

    Returns:
        The figure: small dots are seeds, diamonds means with 95 % t intervals, where there are two seeds; None while
        there is no pair.
    """
    shown = [reading for reading in summary.readings if any(one.n for one in reading.differences)]
    if not shown:
        return None
    looks, count = _looks(summary), len(shown[0].differences)
    figure, panels = _figure(len(shown), 0.9 + len(shown) * (0.85 + 0.33 * count), sharex=True)
    for axes, reading in zip(panels, shown, strict=True):
        seeds = len(reading.seeds)
        names = [tables.name(one) + (f" ({one.n} of {seeds})" if one.n < seeds else "") for one in reading.differences]
        for row, one in enumerate(reading.differences):
            color = looks[one.first]["color"]
            values = list(one.by_seed.values())
            axes.plot(values, np.full(len(values), row + 0.22), "o", color=color, markersize=4, alpha=0.6)
            if one.t_interval is not None:  # of one seed there is no mean to show, either
                axes.plot(one.t_interval, [row, row], color=color, linewidth=2)
                axes.plot(one.mean, row, "D", color=color, markersize=6)
        axes.axvline(0, color=BASELINE, linewidth=1.5, zorder=1)
        axes.set_yticks(range(count), names)
        axes.set_ylim(count - 0.4, -0.6)
        axes.tick_params(left=False, labelbottom=True)
        axes.set_title(f"{reading.name}, {seeds} seed{'s' if seeds > 1 else ''}", fontsize=10, loc="left", color=INK)
    panels[-1].set_xlabel("nats per token; left of zero, the first arm has less loss")
    return figure
