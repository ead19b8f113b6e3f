"""What a person sees of a run: a progress bar on a terminal, plain lines elsewhere."""

import os
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ddl_jax.duration import duration


class SteadyConsole(Console):
    """A console that goes silent when nobody reads it any more (`| head`), rather than ending the run."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Display:
    """Shows a run's progress. For a `with` statement around the loop.

    Args:
        steps: in the whole run.
        done: of them, before this start.
    """

    def __init__(self, steps: int, done: int, console: Console):
        self._console, self._steps, self._start, self._done = console, steps, time.monotonic(), done
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]} tokens/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=steps, completed=done, loss="—", speed="—")

    def __enter__(self) -> "Display":
        self._bar.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._bar.__exit__(*error)

    def advance(self, step: int) -> None:
        self._bar.update(self._task, completed=step)

    def logged(self, record: dict) -> None:
        """Takes up a line of metrics."""
        step, loss, speed = record["step"], f"{record['loss']:.3f}", f"{record['tokens_per_second']:,.0f}"
        self._bar.update(self._task, completed=step, loss=loss, speed=speed)
        if "validation_loss" in record:
            self._console.print(
                f"step {step:>6}   loss {loss}   validation {record['validation_loss']:.3f} nats/token, "
                f"{record['validation_bits_per_byte']:.3f} bits/byte",
                highlight=False,
            )
        elif not self._console.is_terminal:
            left = (time.monotonic() - self._start) / max(step - self._done, 1) * (self._steps - step)
            self._console.print(
                f"step {step:>6}/{self._steps}   loss {loss}   {speed} tokens/s   {duration(left)} left",
                highlight=False,
            )
