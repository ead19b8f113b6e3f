"""What the commands of this package share: arguments that are refused in one line, a line of progress, a table."""

import argparse
from collections.abc import Collection, Sequence
import difflib
import sys


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, with the option that was probably meant, and exits with 2."""

    def error(self, message: str):
        options = [option for action in self._actions for option in action.option_strings]
        for word in message.split():
            if word.startswith("-") and (near := difflib.get_close_matches(word, options, 1)):
                message += f"; did you mean {near[0]}?" if near[0] != word else ""
                break
        self.exit(2, f"{self.prog}: {message}\n")

    def check_name(self, what: str, name: str | None, known: Collection[str]) -> None:
        """Refuses a name that is not known, with the nearest one and all there are; None is always fine."""
        if name is not None and name not in known:
            near = difflib.get_close_matches(name, sorted(known), 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            self.error(f"no {what} {name!r}; {hint}there are: {', '.join(sorted(known)) or 'none'}")


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
