"""Figures of the rewrite's geometry: what an edit X' = X + β k (vᵀ − kᵀX) does to states, norms and earlier edits.

Each function draws arrays it is given and returns a matplotlib Figure; none computes a rewrite. So what they show is
what `pallas_kernels.rewrite` did, and not a second copy of it (notebooks/1_geometry.ipynb calls both).
matplotlib (the extra `plots`) is imported when the first figure is drawn.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxtyping import Array, Float
import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart with any colour vision (jfly.uni-koeln.de/color); black and grey are added.
BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
INK, GREY, PALE = "#222222", "#777777", "#E4E4E4"
SERIES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P")
DOTS_PER_INCH = 84

NAMES = {0.0: "skip", 1.0: "overwrite", 2.0: "reflect"}


def edit_figure(
    states: Float[Array, "gates 2"], gates: Float[Array, "gates"], direction: Float[Array, "2"], target: float
) -> "Figure":
    """One edit of one state in the plane, at several gates.

    Args:
        states: X' for each gate.
        gates: β, ascending.
        direction: k, of length 1.
        target: v, the read-out that the edit aims at.

    Returns:
        The path of X' (line "X'"), a dot for each gate, and the line of states with kᵀx = v (line "target").
    """
    states, gates, direction = _numpy(states, gates, direction)
    figure, (axes,) = _figure(1, width=7.2, height=3.7)
    _target_line(axes, direction, target)
    axes.plot(*states.T, color=BLUE, linewidth=1.5, label="X'")
    axes.scatter(*states.T, color=[_dot_color(β) for β in gates], s=60, zorder=3)
    above, below = (direction[1], -direction[0]), (-direction[1], direction[0])
    for state, β in zip(states, gates, strict=True):
        _note(axes, f"β = {β:g}", state, offset=9 * np.array(below))
        if β in NAMES:
            _note(axes, NAMES[float(β)], state, offset=11 * np.array(above), color=_dot_color(β), weight="bold")
    axes.annotate("", xy=direction, xytext=(0, 0), arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.8})
    _note(axes, "k", direction / 2, offset=8 * np.array(below), weight="bold")
    axes.plot(0, 0, marker="o", markersize=4, color=INK)
    corners = np.concatenate([states, [direction, (0, 0), target * direction]])
    axes.set_xlim(corners[:, 0].min() - 1, corners[:, 0].max() + 1)
    axes.set_ylim(corners[:, 1].min() - 0.8, corners[:, 1].max() + 0.9)
    axes.set_aspect("equal")
    return _finish(figure, axes, "feature 1", "feature 2", "One edit moves the state along k only")


def shapes_figure(
    outlines: Float[Array, "gates points 2"], gates: Float[Array, "gates"], direction: Float[Array, "2"], target: float
) -> "Figure":
    """A drawing in the plane, every point of it edited with the same k, v and β; one panel for each gate.

    Args:
        outlines: X' for each gate and point of the drawing, the points in drawing order; the first gate's is shown
            again, pale, behind the others.
        gates: β for each panel.
        direction: k, of length 1.
        target: v, the same for every point.

    Returns:
        Panels with the edited drawing (line "X'") and the states with kᵀx = v (line "target").
    """
    outlines, gates, direction = _numpy(outlines, gates, direction)
    figure, panels = _figure(len(gates), width=9.2, height=2.7, sharex=True, sharey=True)
    corners = outlines.reshape(-1, 2)
    for axes, outline, β in zip(panels, outlines, gates, strict=True):
        axes.set_xlim(corners[:, 0].min() - 0.4, corners[:, 0].max() + 0.4)
        axes.set_ylim(corners[:, 1].min() - 0.4, corners[:, 1].max() + 0.4)
        axes.set_aspect("equal")
        _target_line(axes, direction, target, named=False)
        axes.fill(*outlines[0].T, color=PALE, zorder=0)
        axes.fill(*outline.T, color=_dot_color(β), alpha=0.25)
        axes.plot(*np.concatenate([outline, outline[:1]]).T, color=_dot_color(β), linewidth=2, label="X'")
        name = NAMES.get(float(β))
        _finish(figure, axes, "", "", f"β = {β:g}" + (f"\n{name}" if name else "\n"))
        axes.set_xticks([])
        axes.set_yticks([])
        for side in axes.spines.values():
            side.set_visible(False)
    return figure


def spectrum_figure(
    gates: Float[Array, "gates"], eigenvalues: Float[Array, "gates width"], determinants: Float[Array, "gates"]
) -> "Figure":
    """The spectrum of the edit's linear part I − β k kᵀ against the gate.

    Args:
        gates: β.
        eigenvalues: of the matrix, ascending, for each gate.
        determinants: of the matrix, for each gate.

    Returns:
        The smallest eigenvalue, the others and the determinant, as lines of those names.
    """
    gates, eigenvalues, determinants = _numpy(gates, eigenvalues, determinants)
    figure, (axes,) = _figure(1, width=7.2, height=3.7)
    axes.axhline(0, color=GREY, linewidth=0.8)
    for β, name in NAMES.items():
        axes.axvline(β, color=PALE, linewidth=1, zorder=0)
        _note(axes, name, (β, 1.42), color=_dot_color(β), weight="bold")
    _note(axes, "shrinks", (0.5, 1.42), color=GREY)
    _note(axes, "shrinks and flips", (1.5, 1.42), color=GREY)
    others = f"the other {eigenvalues.shape[1] - 1} eigenvalues"
    lines = [axes.plot(gates, column, color=GREEN, linewidth=2)[0] for column in eigenvalues.T[1:]]
    lines[0].set_label(others)
    axes.plot(gates, eigenvalues[:, 0], color=VERMILLION, linewidth=2, label="smallest eigenvalue: 1 − βρ")
    axes.plot(
        gates, determinants, "o", markersize=6, markevery=max(1, len(gates) // 10), fillstyle="none", color=INK,
        label="determinant",
    )  # fmt: skip
    axes.set_ylim(-1.15, 1.6)
    axes.set_xlim(-0.17, 2.17)
    axes.set_yticks([-1, 0, 1])
    _legend(axes, loc="lower left")
    return _finish(figure, axes, "gate β", "eigenvalue, determinant", "One eigenvalue moves: the one along k")


def norms_figure(
    gates: Float[Array, "gates"], ratios: Float[Array, "cases states gates"], cases: Sequence[str]
) -> "Figure":
    """How much longer or shorter an edit makes states, against the gate; one panel for each case.

    Args:
        gates: β.
        ratios: ‖X'‖/‖X‖ for each case, state and gate.
        cases: what each case is.

    Returns:
        One line for each state in each panel, and the line of an unchanged norm (named "same norm").
    """
    gates, ratios = _numpy(gates, ratios)
    figure, panels = _figure(len(cases), width=7.8, height=3.2, sharey=True)
    for axes, states, case, color in zip(panels, ratios, cases, SERIES, strict=False):
        axes.axhline(1, color=INK, linewidth=1.2, linestyle=(0, (4, 3)), label="same norm")
        for ratio in states:
            axes.plot(gates, ratio, color=color, linewidth=1.2, alpha=0.7)
        axes.set_xticks([0, 1, 2])
        _legend(axes, loc="upper left")
        _finish(figure, axes, "gate β", "‖X'‖ / ‖X‖" if axes is panels[0] else "", case)
    panels[0].set_ylim(bottom=0)
    return figure


def repetition_figure(gates: Float[Array, "gates"], discrepancies: Float[Array, "gates edits"]) -> "Figure":
    """The discrepancy kᵀX − v under repeated edits along one direction: signed, and its size on a log scale.

    Args:
        gates: β of each series of edits.
        discrepancies: kᵀX − v after 0, 1, 2, … edits.

    Returns:
        Two panels, a line for each gate in both (named "β = …").
    """
    gates, discrepancies = _numpy(gates, discrepancies)
    figure, (signed, size) = _figure(2, width=8.2, height=3.3)
    edits = np.arange(discrepancies.shape[1])
    signed.axhline(0, color=GREY, linewidth=0.8)
    for i, (β, values) in enumerate(zip(gates, discrepancies, strict=True)):
        style = {"color": SERIES[i], "marker": MARKERS[i], "markersize": 5, "linewidth": 1.5, "label": f"β = {β:g}"}
        signed.plot(edits, values, **style)
        size.plot(edits, np.abs(values), **style)
    size.set_yscale("log")
    size.set_ylim(bottom=1e-3)
    _legend(size, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _finish(figure, signed, "edits", "kᵀX − v", "Towards the target, from one side or both")
    return _finish(figure, size, "edits", "|kᵀX − v|", "Geometrically: × |1 − βρ| each")


def interference_figure(
    overlaps: Float[Array, "overlaps"], gates: Float[Array, "gates"], errors: Float[Array, "gates overlaps"]
) -> "Figure":
    """What a second edit, along k', does to the read-out that a first edit set along k.

    Args:
        overlaps: k·k'.
        gates: β of the second edit.
        errors: the change of kᵀX by the second edit, in units of its discrepancy w'.

    Returns:
        One line for each gate (named "β = …").
    """
    overlaps, gates, errors = _numpy(overlaps, gates, errors)
    figure, (axes,) = _figure(1, width=7.2, height=3.3)
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.axvline(0, color=GREY, linewidth=0.8)
    for i, (β, values) in enumerate(zip(gates, errors, strict=True)):
        axes.plot(
            overlaps, values, color=SERIES[i], marker=MARKERS[i], markersize=4.5, linewidth=1.5, label=f"β = {β:g}"
        )
    axes.set_xticks([-1, -0.5, 0, 0.5, 1])
    _legend(axes, loc="upper left")
    return _finish(figure, axes, "overlap k·k'", "change of kᵀX, in units of w'", "Later edits leak into earlier ones")


def alternation_figure(overlaps: Float[Array, "overlaps"], errors: Float[Array, "overlaps rounds"]) -> "Figure":
    """Two edits taking turns, each along its own direction to its own target: what the first still misses.

    Args:
        overlaps: k·k' of each pair of directions.
        errors: |kᵀX − v| of the first direction after 1, 2, … rounds.

    Returns:
        One line for each pair (named "k·k' = …"), on a log scale.
    """
    overlaps, errors = _numpy(overlaps, errors)
    figure, (axes,) = _figure(1, width=7.2, height=3.3)
    rounds = np.arange(1, errors.shape[1] + 1)
    for i, (overlap, values) in enumerate(zip(overlaps, errors, strict=True)):
        style = {"color": SERIES[i], "marker": MARKERS[i], "markersize": 5, "linewidth": 1.5}
        axes.plot(rounds, values, label=f"k·k' = {overlap:g}", **style)
    axes.set_yscale("log")
    axes.set_xticks(rounds)
    _legend(axes, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _finish(
        figure, axes, "rounds (β = 1)", "|kᵀX − v|", "Taking turns settles: × (k·k')² each round"
    )  # fmt: skip


def erase_figure(
    delta: Float[Array, "channels edits"], write_only: Float[Array, "channels edits"], target: float
) -> "Figure":
    """Read-outs under repeated edits, with the erase term and without it.

    Args:
        delta: kᵀX of several states after 0, 1, 2, … edits X' = X + β k (vᵀ − kᵀX).
        write_only: the same states, edited by X' = X + β k vᵀ.
        target: v.

    Returns:
        Two panels, one line for each state, and the target (line "target").
    """
    delta, write_only = _numpy(delta, write_only)
    figure, panels = _figure(2, width=7.8, height=3.2, sharey=True)
    for axes, readouts, title, color, marker in (
        (panels[0], delta, "delta: old content goes", BLUE, "o"),
        (panels[1], write_only, "write-only: old content stays", VERMILLION, "s"),
    ):
        axes.axhline(target, color=INK, linewidth=1.2, linestyle=(0, (4, 3)), label="target")
        for readout in readouts:
            axes.plot(np.arange(len(readout)), readout, color=color, marker=marker, markersize=4, linewidth=1.3)
        _legend(axes, loc="upper left")
        _finish(figure, axes, "edits", "read-out kᵀX" if axes is panels[0] else "", title)
    return figure


def guard_figure(norms: Float[Array, "norms"], squares: Float[Array, "norms"], epsilon: float) -> "Figure":
    """How the guard turns an edit off where the sublayer says nothing: ρ = ‖k‖² against ‖h‖.

    Args:
        norms: ‖h‖, ascending, none 0.
        squares: ρ = ‖k‖² of each.
        epsilon: ε.

    Returns:
        The line "ρ" over a log scale, and a mark where ‖h‖ = ε.
    """
    norms, squares = _numpy(norms, squares)
    figure, (axes,) = _figure(1, width=7.2, height=3.2)
    axes.axvline(epsilon, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    _note(axes, "‖h‖ = ε", (epsilon, 0.93), offset=(-7, 0), color=GREY)
    axes.plot(norms, squares, color=BLUE, marker="o", markersize=4, linewidth=1.5, label="ρ")
    axes.set_xscale("log")
    axes.set_ylim(-0.05, 1.08)
    return _finish(figure, axes, "length of the sublayer's output ‖h‖", "ρ = ‖k‖²", "No output, no edit")


def undo_figure(errors: Mapping[str, Float[Array, "edits"]]) -> "Figure":
    """A stack of edits undone from the last to the first.

    Args:
        errors: by what was done, ‖found − X‖/‖X‖ of the state before each edit.

    Returns:
        A line for each, over the number of edits that were undone.
    """
    figure, (axes,) = _figure(1, width=7.2, height=3.9)
    for (name, error), color, marker in zip(errors.items(), SERIES, MARKERS, strict=False):
        (error,) = _numpy(error)
        undone = np.arange(1, len(error) + 1)
        axes.semilogy(undone, error[::-1], color=color, marker=marker, markersize=4, linewidth=1.5, label=name)
    _legend(axes, loc="upper left", bbox_to_anchor=(0, 0.94))
    return _finish(figure, axes, "edits undone", "relative error of the state", "Undoing without dividing stays exact")


def _figure(panels: int, *, width: float, height: float, **shared: bool) -> "tuple[Figure, Sequence[Axes]]":
    """A figure (inches) with a row of panels, outside pyplot's global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained", facecolor="white")
    return figure, figure.subplots(1, panels, squeeze=False, **shared)[0]


def _finish(figure: "Figure", axes: "Axes", x: str, y: str, title: str) -> "Figure":
    axes.set_xlabel(x, fontsize=10.5, color=INK)
    axes.set_ylabel(y, fontsize=10.5, color=INK)
    axes.set_title(title, fontsize=11.5, color=INK)
    axes.tick_params(labelsize=9.5, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _legend(axes: "Axes", **place) -> None:
    axes.legend(fontsize=9.5, frameon=False, **place)


def _note(axes: "Axes", text: str, place, *, offset=(0, 0), color: str = INK, weight: str = "normal") -> None:
    """Text centred at a point, moved by an offset in points; one that moves sideways keeps clear by its own width."""
    x, y = offset
    align = {"horizontalalignment": "center", "verticalalignment": "bottom" if y > 0 else "top" if y < 0 else "center"}
    if abs(x) > abs(y):
        align = {"horizontalalignment": "left" if x > 0 else "right", "verticalalignment": "center"}
    axes.annotate(
        text, place, xytext=(x, y), textcoords="offset points", fontsize=10, color=color, fontweight=weight,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5}, **align,
    )  # fmt: skip


def _target_line(axes: "Axes", direction: np.ndarray, target: float, *, named: bool = True) -> None:
    """The states whose read-out kᵀx is the target: a line at right angles to k, drawn across the panel."""
    foot, along = target * direction, np.array([-direction[1], direction[0]])
    ends = np.stack([foot - 50 * along, foot + 50 * along])
    axes.plot(*ends.T, color=GREEN, linewidth=1.5, linestyle=(0, (5, 3)), label="target", zorder=1)
    if named:
        _note(axes, "kᵀx = v", foot - 0.55 * along, offset=(8, 0), color=GREEN)


def _dot_color(β: float) -> str:
    return {0.0: GREY, 1.0: VERMILLION, 2.0: PURPLE}.get(float(β), BLUE)


def _numpy(*arrays) -> list[np.ndarray]:
    return [np.asarray(array, dtype=np.float64) for array in arrays]
