"""`python -m pallas_kernels.hopper`: compiles every case of `pallas_kernels.cases` for an H200, without one.

Down to machine code, for what a kernel takes; the bytes that it moves are counted from its own copies.
"""

import json
import sys
import time

import jax

from pallas_kernels import cases as case_list
from pallas_kernels.console import STOPPED, Parser, progress, run, table
from pallas_kernels.hopper import MissingExtra, mesh
from pallas_kernels.hopper.measure import COLUMNS, LEAST_IN_FLIGHT, MANY_TOKENS, MOST_MOVED, faults, measure


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code.

    0; 1 if a kernel is not as it should be; 2 for a bad argument; 3 if it was stopped, after printing what it has.
    """
    parser = Parser(
        prog="python -m pallas_kernels.hopper",
        description="Compiles the kernels for an H200, without one, and prints what they take and what they move. "
        f"Exits with 1 if one spills registers, moves more than {MOST_MOVED} times the least bytes, "
        f"or has less than {LEAST_IN_FLIGHT} in flight, at {MANY_TOKENS} tokens or more.",
        epilog="bytes_in_flight: asked for and not yet there while a multiprocessor computes; bytes_moved: summed over "
        "the kernel's own copies; minimum_bytes: from the operation's formula. Needs the extra compile, no GPU.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list on stdout, and nothing else there")
    parser.add_argument("--kernel", metavar="NAME", help="only this kernel")
    parser.add_argument("--shape", metavar="NAME", help="only this shape")
    try:
        chosen = parser.parse_args(arguments)
        selected = _select(parser, chosen.kernel, chosen.shape)
        mesh({"device": 1})
    except MissingExtra as error:
        print(error, file=sys.stderr)
        return 2
    except SystemExit as stop:  # argparse leaves so
        return int(stop.code or 0)
    rows, wrong, stopped, started = [], [], False, time.monotonic()
    try:
        for number, case in enumerate(selected):
            progress("compiling", number, len(selected), time.monotonic() - started, f"{case.kernel} {case.shape}")
            try:
                row = measure(case)
            except MissingExtra as error:
                progress()
                print(error, file=sys.stderr)
                return 2
            except Exception as error:
                error.add_note(f"in kernel {case.kernel}, shape {case.shape}")
                raise
            rows.append(row)
            wrong += [f"{case.kernel} {case.shape}: {fault}" for fault in faults(case, row)]
    except KeyboardInterrupt:  # what has been compiled is worth having
        stopped = True
    progress()
    print(json.dumps(rows, indent=1) if chosen.json else _table(rows))
    if stopped:
        print(STOPPED, file=sys.stderr)
    for fault in wrong:
        print(fault, file=sys.stderr)
    return 3 if stopped else 1 if wrong else 0


def _select(parser: Parser, kernel: str | None, shape: str | None) -> list[case_list.Case]:
    everything = case_list.cases()
    parser.check_name("kernel", kernel, {case.kernel for case in everything})
    parser.check_name("shape", shape, {case.shape for case in everything if kernel in (None, case.kernel)})
    return case_list.cases(kernel, shape)


def _table(rows: list[dict[str, str | int]]) -> str:
    if not rows:
        return "no kernels"
    titles = (*(column.replace("_per_", "/").replace("_", " ") for column in COLUMNS), "moved/minimum")
    body = [(*(f"{row[c]:,}" if isinstance(row[c], int) else row[c] for c in COLUMNS), _ratio(row)) for row in rows]
    return table(titles, body, names=2)


def _ratio(row: dict[str, str | int]) -> str:
    return f"{row['bytes_moved'] / row['minimum_bytes']:.4f}"


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # a plugin that finds no GPU complains
    sys.exit(run(main))
