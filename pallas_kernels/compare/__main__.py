"""`python -m pallas_kernels.compare`: XLA against Pallas, on whatever device is there.

On a GPU how fast each is, and how exact; on a CPU how exact, and what the programs compiled for an H200 move.
"""

from collections.abc import Callable, Sequence
import json
import logging
import os
from pathlib import Path
import sys
import time

import jax

from pallas_kernels import cases, dispatch, hopper
from pallas_kernels.compare import compiled, report
from pallas_kernels.compare.measure import finite, first_line, measure, row
from pallas_kernels.compare.operations import IMPLEMENTATIONS, PASSES, Comparison
from pallas_kernels.console import STOPPED, Parser, progress, run

SHAPES_ON_GPU = ("small", "small_v1", "small_v8", "medium")
SHAPES_ON_CPU = ("small",)
# Tokens whose results are compared with float64; an even number is cut into two sequences. On a GPU the halves are odd,
# so that groups of tokens end in between. An interpreted kernel takes a tenth of a second for each of its blocks.
TOKENS_ON_GPU = 1022
TOKENS_ON_CPU = 6


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code.

    0; 1 if an implementation fails or is wrong; 2 for a bad argument; 3 if it was stopped, after printing what it has.
    """
    parser = _parser()
    try:
        chosen = parser.parse_args(arguments)
        parser.check_name("operation", chosen.operation, {what.operation for what in PASSES})
        parser.check_name("shape", chosen.shape, cases.SHAPES)
        if chosen.plot is not None:
            if reason := _unwritable(chosen.plot):
                parser.error(f"--plot {chosen.plot}: {reason}" if chosen.plot else f"--plot: {reason}")
            report.require_plots()
    except report.MissingExtra as error:
        print(error, file=sys.stderr)
        return 2
    except SystemExit as stop:  # argparse leaves so
        return int(stop.code or 0)

    on_gpu = _on_gpu()
    tokens = TOKENS_ON_GPU if on_gpu else TOKENS_ON_CPU
    implementations, problems = IMPLEMENTATIONS, []
    try:
        dispatch.explain("pallas")
    except ValueError as error:
        print(f"only XLA is measured: {error}", file=sys.stderr)
        implementations = ("xla",)
    selected = _select(chosen.operation, chosen.shape, SHAPES_ON_GPU if on_gpu else SHAPES_ON_CPU)
    rows, copied, programs, stopped, begun = [], [], [], False, time.monotonic()
    look = _Look(problems.append) if not on_gpu and (not chosen.json or chosen.plot) else None
    try:
        for number, comparison in enumerate(selected):
            progress("comparing", number, len(selected), time.monotonic() - begun, str(comparison))
            outcomes = measure(comparison, implementations, tokens=tokens, timed=on_gpu, complain=problems.append)
            programs += [look(comparison, name) for name in outcomes] if look else []
            rows += [row(comparison, name, outcome) for name, outcome in outcomes.items()]
            copied += [outcome.copied for outcome in outcomes.values() if outcome.copied]
    except KeyboardInterrupt:  # what has been measured is worth having
        stopped = True
    progress()

    card = jax.local_devices()[0].device_kind
    copies = f"{min(copied) / 1e9:,.0f} to {max(copied) / 1e9:,.0f} GB/s" if copied else "nothing measured"
    if on_gpu:
        heading = f"{card}: copies on the device at {copies}. Errors: up to {tokens} tokens against float64."
    else:
        heading = (
            "CPU: here the kernels are interpreted, and times would mean nothing, so there are none. Errors: up to "
            f"{tokens} tokens against float64. Further columns: the programs as compiled for an H200, not run."
        )
    if chosen.json:
        print(heading, file=sys.stderr)
        print(json.dumps([finite(one) for one in rows], indent=1))
    else:
        print(heading)
        print(report.table(rows, compiled.columns(programs[: len(rows)]) if look else None))
    try:
        if chosen.plot is None or not rows:  # stopped before the first
            pass
        elif on_gpu:
            report.plot_speed(rows, chosen.plot, f"{card}, copies at {copies}")
        else:
            report.plot_moved(rows, [program.moved for program in programs[: len(rows)]], chosen.plot)
    except OSError as error:  # such as a disk that is full by now
        problems.append(f"--plot {chosen.plot}: {error.strerror or error}")
    if stopped:
        print(STOPPED, file=sys.stderr)
    for problem in dict.fromkeys(problems):
        print(problem, file=sys.stderr)
    return 3 if stopped else 1 if problems else 0


def _unwritable(name: str) -> str | None:
    """Why no chart can be written to a file of that name, or None; leaves everything as it was."""
    if not name:
        return "the name of the file is empty"
    path = Path(name)
    if os.path.isdir(name):
        return "is a folder; give a file that ends in .png"
    if path.suffix.lower() != ".png":
        return "charts are PNG: give a file that ends in .png"
    parent = path.absolute().parent
    if not os.path.isdir(parent):
        return f"there is no folder {parent}"
    if os.path.exists(name) and not os.path.isfile(name):  # opening a pipe would wait
        return "is not a file"
    new = not os.path.exists(name)
    try:
        with path.open("ab"):
            pass
        if new:
            path.resolve().unlink()  # where it is a link, what it points to
    except OSError as error:
        return f"cannot be written: {error.strerror or error}"
    return None


def _on_gpu() -> bool:
    if any(Path("/dev").glob("nvidia*")):
        return jax.default_backend() == "gpu"
    logging.disable(logging.CRITICAL)  # jax's CUDA plugin says in a traceback that there is no GPU
    try:
        return jax.default_backend() == "gpu"
    finally:
        logging.disable(logging.NOTSET)


class _Look:
    """Looks at programs compiled for an H200; without the extra compile says so once, and does without."""

    def __init__(self, complain: Callable[[str], None]):
        self._look, self._complain = compiled.compiled, complain

    def __call__(self, comparison: Comparison, implementation: str) -> compiled.Compiled:
        try:
            return self._look(comparison, implementation)
        except hopper.MissingExtra as error:
            progress()
            print(error, file=sys.stderr)
            self._look = compiled.moved
            return self._look(comparison, implementation)
        except Exception as failure:
            self._complain(f"{comparison} {implementation}, for an H200: {first_line(failure)}")
            return compiled.Compiled(None)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m pallas_kernels.compare",
        description="Compares the operations as XLA compiles them with the Pallas kernels, forward and backward: time "
        "on the device, bandwidth, and the error against float64. On a CPU, where kernels are interpreted: the error, "
        "and what the programs move when they are compiled for an H200. Exits with 1 if one fails or is wrong.",
        epilog="GB/s: the least bytes that the operation must move, over the time; of copy: the share of what a plain "
        "copy on the same device moves per second, measured in turns with it. Shapes by default: "
        f"{', '.join(SHAPES_ON_GPU)}; on a CPU {', '.join(SHAPES_ON_CPU)}.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list on stdout, and nothing else there")
    parser.add_argument("--operation", metavar="NAME", help="only this operation")
    parser.add_argument("--shape", metavar="NAME", help="only this shape, any of pallas_kernels.cases")
    parser.add_argument("--plot", metavar="FILE.png", help="draw a bar chart, too (extra plots)")
    return parser


def _select(operation: str | None, shape: str | None, default: Sequence[str]) -> list[Comparison]:
    shapes = default if shape is None else (shape,)
    return [Comparison(what, name) for name in shapes for what in PASSES if operation in (None, what.operation)]


if __name__ == "__main__":
    sys.exit(run(main))
