"""How far long work has come, on stderr: a bar with the time left on a terminal, now and then a line elsewhere."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ddl_jax.training.display import duration

EVERY = 30.0  # seconds between lines


class Counted:
    """For a `with` statement around the work.

    Args:
        what: is being done.
        total: of what `advance` counts.
    """

    def __init__(self, what: str, total: int):
        self._what, self._total, self._done = what, total, 0
        self._begun = self._said = time.monotonic()
        console = Console(stderr=True)
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        columns += [TextColumn("left"), TimeRemainingColumn()]
        self._plain = not console.is_terminal
        self._bar = Progress(*columns, console=console, transient=True, disable=self._plain)
        self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> "Counted":
        self._bar.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._bar.__exit__(*error)

    def advance(self, count: int) -> None:
        """So many more are done."""
        self._done += count
        self._bar.advance(self._task, count)
        now = time.monotonic()
        if self._plain and now - self._said >= EVERY and self._done < self._total:
            self._said = now
            left = (now - self._begun) / self._done * (self._total - self._done)
            print(f"{self._what}: {self._done:,} of {self._total:,}, {duration(left)} left", file=sys.stderr)
