"""The rows of a comparison as a table for people and as a bar chart."""

from collections.abc import Mapping, Sequence
import importlib.util
import math
from pathlib import Path

from pallas_kernels import console

COLUMNS = (
    "operation",
    "shape",
    "pass",
    "implementation",
    "seconds",
    "gigabytes_per_second",
    "copy_fraction",
    "relative_error",
)
NAMES = {"xla": "XLA", "pallas": "Pallas"}
COLOURS = {"xla": "#9ca3af", "pallas": "#2563eb"}
SPEED = "least bytes per second, as a share of a copy on the device"
MOVED = "bytes moved, as a multiple of the least bytes"
MISSING = "–"
Row = Mapping[str, str | float | None]


class MissingExtra(ImportError):
    """The extra `plots` is not installed."""


def table(rows: Sequence[Row], facts: Mapping[str, Sequence[str]] | None = None) -> str:
    """The rows, aligned.

    Args:
        rows: `COLUMNS` by name; None is shown as a dash.
        facts: further columns by their titles, a cell for each row.
    """
    titles = ("operation", "shape", "pass", "implementation", "µs", "GB/s", "of copy", "relative error", *(facts or ()))
    further = list(zip(*facts.values(), strict=True)) if facts else [()] * len(rows)
    body = [
        (
            *(str(row[column]) for column in COLUMNS[:4]),
            _number(row["seconds"], lambda seconds: f"{1e6 * seconds:,.1f}"),
            _number(row["gigabytes_per_second"], "{:,.0f}".format),
            _number(row["copy_fraction"], "{:.1%}".format),
            _number(row["relative_error"], "{:.1e}".format),
            *cells,
        )
        for row, cells in zip(rows, further, strict=True)
    ]
    return console.table(titles, body, names=4)


def _number(value: float | None, write) -> str:
    return MISSING if value is None else write(value)


def require_plots() -> None:
    """Raises MissingExtra where charts cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtra("--plot needs matplotlib: pip install -e '.[plots]'")


def plot_speed(rows: Sequence[Row], path: str | Path, title: str) -> None:
    """A chart of `copy_fraction`, as `plot`; the title names the card."""
    plot(rows, [row["copy_fraction"] for row in rows], path, title=title, axis=SPEED, mark="{:.0%}", tick="{:.0%}")


def plot_moved(rows: Sequence[Row], moved: Sequence[float | None], path: str | Path) -> None:
    """A chart of the bytes that programs compiled for an H200 move, as multiples of the least, as `plot`."""
    title = "Compiled for an H200, not run: bytes between memory and chip"
    plot(rows, moved, path, title=title, axis=MOVED, mark="{:.2f}×", tick="{:g}×")


def plot(
    rows: Sequence[Row],
    values: Sequence[float | None],
    path: str | Path,
    *,
    title: str,
    axis: str,
    mark: str,
    tick: str,
) -> None:
    """Draws a bar for each value, XLA and Pallas side by side, a panel for each shape, as a PNG.

    Args:
        rows: what the values belong to.
        values: those that are None, or not finite, get no bar.
        path: the file.
        title: what was measured, and on which card.
        axis: what the values are, and their unit.
        mark: a format for the number at the end of a bar, such as "{:.0%}".
        tick: a format for the numbers along the axis.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    require_plots()
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    passes = list(dict.fromkeys((row["operation"], row["pass"]) for row in rows))
    implementations = [name for name in NAMES if any(row["implementation"] == name for row in rows)]
    by_name = {
        (row["shape"], (row["operation"], row["pass"]), row["implementation"]): value
        for row, value in zip(rows, values, strict=True)
        if value is not None and math.isfinite(value)
    }
    figure = Figure(
        figsize=(4.2 + 2.9 * len(shapes) + 1.6 * (len(shapes) == 1), 1.5 + 0.62 * len(passes)),
        dpi=150,
        layout="constrained",
    )
    panels = figure.subplots(1, len(shapes), sharex=True, sharey=True, squeeze=False)[0]
    most = max([1.0, *by_name.values()])
    thickness = 0.8 / len(implementations)
    for panel, shape in zip(panels, shapes, strict=True):
        for place, implementation in enumerate(implementations):
            offset = (place - (len(implementations) - 1) / 2) * thickness
            found = [(y, by_name.get((shape, which, implementation))) for y, which in enumerate(passes)]
            found = [(y + offset, value) for y, value in found if value is not None]
            bars = panel.barh(
                [y for y, _ in found],
                [value for _, value in found],
                height=0.92 * thickness,
                color=COLOURS[implementation],
                label=NAMES[implementation],
            )
            paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # over the line at 1
            panel.bar_label(bars, [mark.format(value) for _, value in found], padding=4, fontsize=8, bbox=paper)
        panel.axvline(1.0, color="black", linewidth=0.8, linestyle=":", zorder=1.5)
        panel.set_title(shape, fontsize=10)
        panel.set_xlim(0, 1.18 * most)
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick.format(value)))
        panel.tick_params(axis="x", labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(passes)), [f"{operation}\n{direction}" for operation, direction in passes])
    panels[0].tick_params(axis="y", labelsize=9)
    panels[0].set_ylim(len(passes) - 0.5, -0.5)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    figure.supxlabel(axis, fontsize=10)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, format="png")
