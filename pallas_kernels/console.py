"""What the commands of this package share: arguments refused in one line, a line of progress, a table, and the end."""

import argparse
from collections.abc import Callable, Collection, Sequence
import difflib
import os
import signal
import sys

STOPPED = "stopped before the end"
UNREAD = 128 + signal.SIGPIPE  # as a shell says of a program whose output nobody reads any more


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, with the option that was probably meant, and exits with 2."""

    def error(self, message: str):
        options = [option for action in self._actions for option in action.option_strings]
        for word in message.split():
            if not set(word.rstrip(":").split("/")).isdisjoint(
                options
            ):  # spelled right; argparse puts a colon after it
                break
            if word.startswith("-") and (near := difflib.get_close_matches(word, options, 1)):
                message += f"; did you mean {near[0]}?"
                break
        self.exit(2, f"{self.prog}: {message}\n")

    def check_name(self, what: str, name: str | None, known: Collection[str]) -> None:
        """Refuses a name that is not known, with the nearest one and all there are; None is always fine."""
        if name is not None and name not in known:
            near = difflib.get_close_matches(name, sorted(known), 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            self.error(f"no {what} {name!r}; {hint}there are: {', '.join(sorted(known)) or 'none'}")


def run(main: Callable[[], int]) -> int:
    """The exit code of `main`; 3 if it was stopped, and `UNREAD` if nobody reads its output any more (`| head`)."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: prints what there is
    try:
        try:
            code = main()
        except KeyboardInterrupt:  # where there is nothing to print
            progress()
            print(STOPPED, file=sys.stderr)
            code = 3
        sys.stdout.flush()  # here, since Python complains of what fails when it ends
        return code
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BrokenPipeError:  # what is left goes nowhere, or Python would try again at its end
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return UNREAD


def progress(verb: str = "", done: int = 0, total: int = 0, seconds: float = 0.0, what: str = "") -> None:
    """What is being done, on one line of stderr that replaces the last; without arguments clears it.

    Args:
        verb: such as `compiling`.
        done: how many are done.
        total: of how many.
        seconds: that those took.
        what: the one that is next.
    """
    terminal = sys.stderr.isatty()
    if not total:
        print("\r\x1b[K" if terminal else "", end="", file=sys.stderr, flush=True)
        return
    left = f", about {seconds / done * (total - done):.0f} s left" if done else ""
    line = f"{verb} {done + 1}/{total} {what}{left}"
    print(f"\r{line}\x1b[K" if terminal else f"{line}\n", end="", file=sys.stderr, flush=True)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], names: int) -> str:
    """Rows under their titles; the first `names` columns hold words and start at the left, the others hold numbers."""
    widths = [max(len(line[i]) for line in (titles, *rows)) for i in range(len(titles))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < names else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (titles, *rows)
    )
