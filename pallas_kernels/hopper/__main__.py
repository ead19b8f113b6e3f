"""`python -m pallas_kernels.hopper`: compiles every case of `pallas_kernels.cases` for an H200, without one.

Down to machine code, for what a kernel takes; the bytes that it moves are counted from its own copies.
"""

import argparse
import difflib
import json
import math
import sys
import time

import jax

from pallas_kernels import cases as case_list
from pallas_kernels.h200 import MULTIPROCESSORS
from pallas_kernels.hopper import MissingExtra, bytes_moved, mesh, resources

# A kernel may move this much more than the least, from this many tokens on: below it, what every block loads for
# itself (the reader's weights) is not small beside the tokens.
MOST_MOVED = 1.05
MANY_TOKENS = 32768
LEAST_IN_FLIGHT = 32 * 1024  # bytes per multiprocessor: 4.8 TB/s for 0.9 microseconds of latency (Little's law)

COLUMNS = (
    "kernel",
    "shape",
    "registers",
    "spill_bytes",
    "shared_memory_bytes",
    "blocks_per_multiprocessor",
    "bytes_in_flight",
    "bytes_moved",
    "minimum_bytes",
)


def measure(case: case_list.Case) -> dict[str, str | int]:
    """One row of the table: `COLUMNS` by name. Bytes in flight are those of a whole multiprocessor."""
    taken = resources(case.function, *case.arguments)
    traffic = bytes_moved(case.function, *case.arguments)
    # The grid may have fewer blocks than there is room for.
    resident = min(taken.blocks_per_multiprocessor, math.ceil(traffic.blocks / MULTIPROCESSORS))
    values = (
        case.kernel,
        case.shape,
        taken.registers,
        taken.spill_bytes,
        taken.shared_memory_bytes,
        taken.blocks_per_multiprocessor,
        traffic.in_flight * resident,
        traffic.moved,
        case.minimum_bytes,
    )
    return dict(zip(COLUMNS, values, strict=True))


def faults(case: case_list.Case, row: dict[str, str | int]) -> list[str]:
    """What is wrong with a kernel, in words; empty if it is as it should be."""
    found = []
    if row["spill_bytes"]:
        found.append(f"spills {row['spill_bytes']} bytes per thread")
    if row["blocks_per_multiprocessor"] == 0:
        found.append(f"cannot be launched: {row['shared_memory_bytes']} bytes of shared memory per block")
    if case.tokens >= MANY_TOKENS and row["bytes_moved"] > MOST_MOVED * row["minimum_bytes"]:
        ratio = row["bytes_moved"] / row["minimum_bytes"]
        found.append(f"moves {ratio:.3f} times the least bytes; {MOST_MOVED} is allowed")
    if case.tokens >= MANY_TOKENS and row["bytes_in_flight"] < LEAST_IN_FLIGHT:
        found.append(f"has {row['bytes_in_flight']} bytes in flight; {LEAST_IN_FLIGHT} hide the memory's latency")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, 1 if a kernel is not as it should be, 2 for a bad argument."""
    parser = _Parser(
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
    rows, wrong, started = [], [], time.monotonic()
    for number, case in enumerate(selected):
        _progress(number, len(selected), time.monotonic() - started, f"{case.kernel} {case.shape}")
        try:
            row = measure(case)
        except MissingExtra as error:
            _progress()
            print(error, file=sys.stderr)
            return 2
        except Exception as error:
            error.add_note(f"in kernel {case.kernel}, shape {case.shape}")
            raise
        rows.append(row)
        wrong += [f"{case.kernel} {case.shape}: {fault}" for fault in faults(case, row)]
    _progress()
    print(json.dumps(rows, indent=1) if chosen.json else _table(rows))
    for fault in wrong:
        print(fault, file=sys.stderr)
    return 1 if wrong else 0


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, with the option that was probably meant."""

    def error(self, message: str):
        options = [option for action in self._actions for option in action.option_strings]
        for word in message.split():
            if word.startswith("-") and (near := difflib.get_close_matches(word, options, 1)):
                message += f"; did you mean {near[0]}?" if near[0] != word else ""
                break
        self.exit(2, f"{self.prog}: {message}\n")


def _select(parser: _Parser, kernel: str | None, shape: str | None) -> list[case_list.Case]:
    everything = case_list.cases()
    for what, name, known in (
        ("kernel", kernel, {case.kernel for case in everything}),
        ("shape", shape, {case.shape for case in everything if kernel in (None, case.kernel)}),
    ):
        if name is not None and name not in known:
            near = difflib.get_close_matches(name, sorted(known), 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            parser.error(f"no {what} {name!r}; {hint}there are: {', '.join(sorted(known)) or 'none'}")
    return case_list.cases(kernel, shape)


def _progress(done: int = 0, total: int = 0, seconds: float = 0.0, what: str = "") -> None:
    """What is being compiled, on one line of stderr that replaces the last; without arguments clears it."""
    terminal = sys.stderr.isatty()
    if not total:
        print("\r\x1b[K" if terminal else "", end="", file=sys.stderr, flush=True)
        return
    left = f", about {seconds / done * (total - done):.0f} s left" if done else ""
    line = f"compiling {done + 1}/{total} {what}{left}"
    print(f"\r{line}\x1b[K" if terminal else f"{line}\n", end="", file=sys.stderr, flush=True)


def _table(rows: list[dict[str, str | int]]) -> str:
    if not rows:
        return "no kernels"
    titles = (*(column.replace("_per_", "/").replace("_", " ") for column in COLUMNS), "moved/minimum")
    body = [(*(f"{row[c]:,}" if isinstance(row[c], int) else row[c] for c in COLUMNS), _ratio(row)) for row in rows]
    widths = [max(len(line[i]) for line in (titles, *body)) for i in range(len(titles))]
    left = (True, True, *[False] * (len(titles) - 2))
    return "\n".join(
        "  ".join(cell.ljust(w) if first else cell.rjust(w) for cell, w, first in zip(line, widths, left, strict=True))
        for line in (titles, *body)
    )


def _ratio(row: dict[str, str | int]) -> str:
    return f"{row['bytes_moved'] / row['minimum_bytes']:.4f}"


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # a plugin that finds no GPU complains
    sys.exit(main())
