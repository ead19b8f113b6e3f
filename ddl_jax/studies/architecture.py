"""The picture of one sublayer: plain residual addition above, the Deep Delta sublayer below.

    python -m ddl_jax.studies.architecture docs/architecture.svg

draws it (the extra `plots`; .svg or .png). Letters as in the code: X state, x read, c context, h branch, k direction,
β gate, v value, r readout, w discrepancy.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Face and edge of boxes: what every Transformer has, what the residual stream brings, the operation on the state.
BACKBONE, STREAM, STATE = ("#F1F1EF", "#8A8A86"), ("#E3F0F9", "#0072B2"), ("#FBEBDD", "#D55E00")
CHANNELS = ("#0072B2", "#3A8FC4", "#74AED6", "#A9CDE6")  # the value channels of the state, V = 4 of them drawn
INK, GREY = "#222222", "#6B6B6B"

# Columns (centres) that the two halves share, and rows. One unit is a tenth of an inch.
READER, NORM, SUBLAYER, DIRECTION, WRITE = 13, 29, 45, 62, 83
PLAIN_STATE, PLAIN_BRANCH = 58, 49.5
DELTA_STATE, DELTA_BRANCH, GATE, VALUE = 34, 20, 11.5, 4
WIDTH, HEIGHT = 104, 66


def sublayer_figure() -> "Figure":
    """One sublayer of a plain Transformer and of a Deep Delta one, side by side.

    Returns:
        The figure; its texts are the boxes' names and the letters on the arrows.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 10, HEIGHT / 10), dpi=110, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(-0.5, HEIGHT - 0.5))
    axes.axis("off")
    _plain(axes)
    axes.plot([2, WIDTH - 2], [44.5, 44.5], color="#DDDDDD", linewidth=1)
    _delta(axes)
    return figure


def _plain(axes: "Axes") -> None:
    _text(axes, 2, 63.5, "Residual addition", size=13, weight="bold", align="left")
    _text(axes, 21.5, 63.4, "the sublayer's output is added", size=10.5, color=GREY, align="left")
    _line(axes, [(5, PLAIN_STATE), (WRITE - 2.2, PLAIN_STATE)], color=CHANNELS[0], width=2.4)
    _line(axes, [(WRITE + 2.2, PLAIN_STATE), (98, PLAIN_STATE)], color=CHANNELS[0], width=2.4, arrow=True)
    _text(axes, 2.5, PLAIN_STATE, "x", size=13, weight="bold")
    _text(axes, 101, PLAIN_STATE, "x'", size=13, weight="bold")
    _dots(axes, READER, [PLAIN_STATE])
    _line(axes, [(READER, PLAIN_STATE), (READER, PLAIN_BRANCH), (NORM - 5, PLAIN_BRANCH)], arrow=True)
    _box(axes, NORM, PLAIN_BRANCH, 10, 5, BACKBONE, "norm")
    _line(axes, [(NORM + 5, PLAIN_BRANCH), (SUBLAYER - 6.5, PLAIN_BRANCH)], arrow=True)
    _box(axes, SUBLAYER, PLAIN_BRANCH, 13, 6, BACKBONE, "sublayer", "attention or MLP")
    _line(axes, [(SUBLAYER + 6.5, PLAIN_BRANCH), (WRITE, PLAIN_BRANCH), (WRITE, PLAIN_STATE - 2.2)], arrow=True)
    _text(axes, SUBLAYER + 8.6, PLAIN_BRANCH + 1.5, "h")
    _circle(axes, WRITE, PLAIN_STATE, "+")


def _delta(axes: "Axes") -> None:
    _text(axes, 2, 41.7, "Deep Delta", size=13, weight="bold", align="left")
    _text(axes, 15, 41.6, "the sublayer's output says where to edit", size=10.5, color=GREY, align="left")
    channels = [DELTA_STATE + 1.35 - 0.9 * i for i in range(len(CHANNELS))]
    for y, color in zip(channels, CHANNELS, strict=True):
        _line(axes, [(5, y), (WRITE - 12, y)], color=color, width=2.4)
        _line(axes, [(WRITE + 12, y), (98, y)], color=color, width=2.4, arrow=True)
    _text(axes, 2.5, DELTA_STATE, "X", size=13, weight="bold")
    _text(axes, 101, DELTA_STATE, "X'", size=13, weight="bold")
    _text(axes, 5, DELTA_STATE + 3.1, "V channels of d features", size=9, color=GREY, align="left")

    _dots(axes, READER, channels)
    _line(axes, [(READER, channels[0]), (READER, DELTA_BRANCH + 3)], arrow=True)
    _box(axes, READER, DELTA_BRANCH, 12, 6, STREAM, "reader", "V channels → 1")
    _line(axes, [(READER + 6, DELTA_BRANCH), (NORM - 5, DELTA_BRANCH)], arrow=True)
    _text(axes, READER + 8, DELTA_BRANCH + 1.5, "x")
    _box(axes, NORM, DELTA_BRANCH, 10, 5, BACKBONE, "norm")
    _line(axes, [(NORM + 5, DELTA_BRANCH), (SUBLAYER - 6.5, DELTA_BRANCH)], arrow=True)
    fork = NORM + 7
    _text(axes, fork, DELTA_BRANCH + 1.5, "c")
    _box(axes, SUBLAYER, DELTA_BRANCH, 13, 6, BACKBONE, "sublayer", "attention or MLP")
    _line(axes, [(SUBLAYER + 6.5, DELTA_BRANCH), (DIRECTION - 6.5, DELTA_BRANCH)], arrow=True)
    _text(axes, SUBLAYER + 8.6, DELTA_BRANCH + 1.5, "h")

    bottom = DELTA_STATE - 6.5
    _box(axes, DIRECTION, DELTA_BRANCH, 13, 6, STREAM, "direction", "h / √(‖h‖² + ε²)")
    _box(axes, DIRECTION, GATE, 13, 6, STREAM, "gate", "2 · sigmoid")
    _box(axes, DIRECTION, VALUE, 13, 6, STREAM, "value", "one per channel")
    for y, x, letter, meaning in (
        (DELTA_BRANCH, WRITE - 8, "k", "where"),
        (GATE, WRITE, "β", "how far"),
        (VALUE, WRITE + 8, "v", "what"),
    ):
        if y != DELTA_BRANCH:
            _line(axes, [(fork, DELTA_BRANCH), (fork, y), (DIRECTION - 6.5, y)], arrow=True)
        _line(axes, [(DIRECTION + 6.5, y), (x, y), (x, bottom)], arrow=True)
        _text(axes, x + 1.1, bottom - 2.8, letter, align="left", weight="bold")
        _text(axes, x + 1.1, bottom - 4.8, meaning, size=9, color=GREY, align="left")
    _dots(axes, fork, [DELTA_BRANCH])

    _box(axes, WRITE, DELTA_STATE, 24, 13, STATE)
    _text(axes, WRITE, DELTA_STATE + 4.4, "rewrite", size=11.5, weight="bold")
    for i, (equation, meaning) in enumerate(
        (("r = kᵀX", "read out"), ("w = v − r", "compare"), ("X' = X + β k wᵀ", "write"))
    ):
        y = DELTA_STATE + 1.2 - 2.8 * i
        _text(axes, WRITE - 10.5, y, equation, size=10.5, align="left")
        _text(axes, WRITE + 10.5, y, meaning, size=9, color=GREY, align="right")
    _text(axes, WRITE, DELTA_STATE + 8, "β = 0 skips · 1 overwrites · 2 reflects", size=9, color=GREY)


def _box(axes: "Axes", x: float, y: float, width: float, height: float, colors, name: str = "", detail: str = ""):
    from matplotlib.patches import FancyBboxPatch

    face, edge = colors
    corner = (x - width / 2, y - height / 2)
    style = "round,pad=0,rounding_size=1.1"
    axes.add_patch(
        FancyBboxPatch(corner, width, height, style, facecolor=face, edgecolor=edge, linewidth=1.4, zorder=2)
    )
    _text(axes, x, y + (1.1 if detail else 0), name, size=11.5)
    _text(axes, x, y - 1.4, detail, size=8.5, color=GREY)


def _circle(axes: "Axes", x: float, y: float, sign: str) -> None:
    from matplotlib.patches import Circle

    face, edge = STATE
    axes.add_patch(Circle((x, y), 2.2, facecolor=face, edgecolor=edge, linewidth=1.4, zorder=2))
    _text(axes, x, y, sign, size=15)


def _line(axes: "Axes", points, *, color: str = INK, width: float = 1.3, arrow: bool = False) -> None:
    """A line through points; with an arrow, its end is drawn as a head that touches the last point."""
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Outline

    style = f"-|>,head_length={3.2 + width},head_width={1.6 + width / 2}" if arrow else "-"
    axes.add_patch(
        FancyArrowPatch(
            path=Outline(points), arrowstyle=style, color=color, linewidth=width, capstyle="butt", joinstyle="round",
            mutation_scale=1, zorder=1,
        )
    )  # fmt: skip


def _dots(axes: "Axes", x: float, heights) -> None:
    axes.plot([x] * len(heights), heights, linestyle="none", marker="o", markersize=4, color=INK, zorder=3)


def _text(axes, x, y, text, *, size=11.0, color=INK, weight="normal", align="center"):
    if text:
        axes.text(x, y, text, fontsize=size, color=color, fontweight=weight, ha=align, va="center_baseline", zorder=3)


def main() -> None:
    """Draws the picture into the file that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m ddl_jax.studies.architecture", description="Draws one sublayer.")
    parser.add_argument("path", type=Path, help="where to; ends in .svg or .png")
    path = parser.parse_args().path
    if path.suffix not in (".svg", ".png"):
        parser.error(f"{path} does not end in .svg or .png")
    import matplotlib

    # Neither a date nor random identifiers, so that drawing it again gives the same file.
    with matplotlib.rc_context({"svg.hashsalt": "ddl"}):
        sublayer_figure().savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
