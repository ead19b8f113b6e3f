"""The training processes of a study: one on each share of the machine, until every planned run has ended."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import math
from pathlib import Path
import signal
import subprocess
import time
from typing import Any

from ddl_jax.atomic import write_atomically
from ddl_jax.config import Config
from ddl_jax.duration import duration
from ddl_jax.stop import StopRequest
from ddl_jax.studies.design import PlannedRun, final_loss
from ddl_jax.studies.folder import read_json
from ddl_jax.studies.places import Place, start
from ddl_jax.studies.schedule import Plan, Progress, expected_seconds, progress, total_seconds
from ddl_jax.studies.table import Display, Row, loss, said

STOPPED, DIVERGED = 3, 4  # exit codes of training
POLL = 0.2  # seconds


@dataclasses.dataclass
class _Job:
    process: subprocess.Popen
    begun: float  # time.monotonic()
    first_step: int  # where it goes on from


class Jobs:
    """The runs of a study. For a `with` statement; on leaving it, by whatever way, no process is left.

    Args:
        folder: of the study.
        configs: of the arms.
        measured: what measured.json says of each of them.
        shares: of the machine.
        planned: losses → the plan that follows from them.
        retry: whether runs that failed earlier are begun again.

    Attributes:
        losses: final validation losses of finished runs; infinite for those that diverged.
        failures: what runs said that failed or diverged.
    """

    def __init__(
        self,
        folder: Path,
        configs: Mapping[str, Config],
        measured: Mapping[str, Mapping[str, Any]],
        shares: Sequence[Place],
        planned: Callable[[Mapping[PlannedRun, float]], Plan],
        retry: bool = False,
    ):
        self._folder, self._configs, self._measured, self._shares = folder, configs, measured, shares
        self._planned, self._retry = planned, retry
        self.losses: dict[PlannedRun, float] = {}
        self.failures: dict[PlannedRun, str] = {}
        self._progress: dict[PlannedRun, Progress] = {}
        self._active: dict[Place, PlannedRun] = {}
        self._jobs: dict[PlannedRun, _Job] = {}
        self._took = self._expected = 0.0  # seconds, of the runs that ended
        self._look()

    def __enter__(self) -> "Jobs":
        return self

    def __exit__(self, *_) -> None:
        for run in self._active.values():
            process = self._jobs[run].process
            process.kill()
            process.wait()

    def _look(self) -> None:
        """Makes the plan, and takes up what earlier starts have left; once more where that lets the plan grow."""
        while True:
            self.plan = self._planned(self.losses)
            new = [run for run in self.plan.runs if run not in self._progress]
            if not new:
                return
            for run in new:
                self._take_up(run)

    def _take_up(self, run: PlannedRun) -> None:
        self._progress[run] = progress(run.folder(self._folder))
        value = final_loss(run.folder(self._folder), run.steps)
        failure = read_json(run.beside(self._folder, "failed.json"))
        if value is not None:
            self.losses[run] = value
        elif failure is not None:
            if failure["exit_code"] == DIVERGED:
                self.losses[run] = math.inf
            elif self._retry:
                return
            self.failures[run] = failure["message"]

    def work(self, stop: StopRequest, display: Display) -> None:
        """Makes the runs, and shows it; returns when none is left, or when those that ran have stopped on request."""
        asked = False
        while True:
            for place, run in list(self._active.items()):
                if (code := self._jobs[run].process.poll()) is not None:
                    del self._active[place]
                    self._end(run, code, bool(stop))
                    display.say(self._ended(run))
                    self._look()
            if stop and not asked:
                asked = True
                for run in self._active.values():
                    self._jobs[run].process.terminate()
            free = [place for place in self._shares if place not in self._active]
            for place, run in zip(free, [] if stop else self.waiting(), strict=False):
                self._begin(place, run)
                display.say(f"{said(run)}: begins")
            for run in self._active.values():
                self._progress[run] = progress(run.folder(self._folder))
            display.update(self.rows(), self.summary())
            if not self._active:
                return
            time.sleep(POLL)

    def _begin(self, place: Place, run: PlannedRun) -> None:
        folder, log = run.folder(self._folder), run.beside(self._folder, "log")
        folder.parent.mkdir(parents=True, exist_ok=True)
        run.beside(self._folder, "failed.json").unlink(missing_ok=True)
        settings = {
            "config": self._folder / "arms" / f"{run.arm}.yaml",
            "run_dir": folder,
            "seed": run.seed,
            "training.steps": run.steps,
            "optimizer.learning_rate": run.learning_rate,
        }
        arguments = [text for key, value in settings.items() for text in (f"--{key}", f"{value}")]
        with open(log, "ab") as output:
            process = start(place, ["train", *arguments], output, subprocess.STDOUT)
        self._active[place] = run
        self._jobs[run] = _Job(process, time.monotonic(), self._progress[run].step)

    def _end(self, run: PlannedRun, code: int, stopping: bool) -> None:
        folder, job = run.folder(self._folder), self._jobs[run]
        job.process.stdin.close()
        self._progress[run] = progress(folder)
        self._took += time.monotonic() - job.begun
        self._expected += self._expected_by_now(run)
        value = final_loss(folder, run.steps)
        if value is not None:
            self.losses[run] = value
        elif not (stopping and (code == STOPPED or code < 0)):
            if code == DIVERGED:
                self.losses[run] = math.inf
            self.failures[run] = _message(run.beside(self._folder, "log"), code)
            failure = {"exit_code": code, "message": self.failures[run]}
            write_atomically(run.beside(self._folder, "failed.json"), json.dumps(failure, indent=2) + "\n")

    def _ended(self, run: PlannedRun) -> str:
        what = {"done": f"done, validation {loss(self._progress[run].validation)}", "waiting": "stopped"}
        state = self.state(run)
        text = what[state] if state in what else f"{state}: {self.failures[run]}"
        return f"{said(run)}: {text}; {self.summary()}"

    def waiting(self) -> list[PlannedRun]:
        """The runs that are still to be begun, or gone on with."""
        return [run for run in self.plan.runs if self.state(run) == "waiting"]

    def state(self, run: PlannedRun) -> str:
        """One of done, diverged, failed, running, waiting."""
        if run in self._active.values():
            return "running"
        if run in self.failures:
            return "diverged" if run in self.losses else "failed"
        return "done" if run in self.losses else "waiting"

    def rows(self) -> list[Row]:
        """Every run of the plan, for the table."""
        return [
            Row(run, state, self._progress[run], self._left(run) if state in ("running", "waiting") else None)
            for run in self.plan.runs
            for state in [self.state(run)]
        ]

    def summary(self) -> str:
        """How far the study is, in a line."""
        states = [self.state(run) for run in self.plan.runs]
        counts = {name: states.count(name) for name in ("done", "diverged", "failed")}
        said = [f"{counts['done']} of {len(states)} runs done"]
        said += [f"{count} {name}" for name, count in counts.items() if count and name != "done"]
        if self.plan.open:
            said.append(f"up to {len(self.plan.open)} more once learning rates are chosen")
        left = self.seconds_left()
        return ", ".join(said) + (f"; {duration(left)} left" if left else "")

    def seconds_left(self) -> float:
        """Until all is done, at the pace so far."""
        runs = [run for run in self.plan.runs if self.state(run) in ("running", "waiting")]
        return total_seconds([self._left(run) for run in [*runs, *self.plan.open]], len(self._shares))

    def _left(self, run: PlannedRun) -> float:
        done = self._progress[run].step if run in self._progress else 0
        return self._pace() * expected_seconds(run, self._configs[run.arm], self._measured[run.arm], done)

    def _expected_by_now(self, run: PlannedRun) -> float:
        """What should have been needed for what this start of the run has done so far."""
        config, measured = self._configs[run.arm], self._measured[run.arm]
        begun, now = self._jobs[run].first_step, self._progress[run].step
        if now <= begun:
            return 0.0
        return expected_seconds(run, config, measured, begun) - expected_seconds(run, config, measured, now)

    def _pace(self) -> float:
        """Seconds that runs take over those expected by the measurement."""
        under_way = [run for run in self._active.values() if self._expected_by_now(run)]
        took = self._took + sum(time.monotonic() - self._jobs[run].begun for run in under_way)
        expected = self._expected + sum(map(self._expected_by_now, under_way))
        return took / expected if expected else 1.0


def _message(log: Path, code: int) -> str:
    """Why a run ended: the last line that it printed, or the signal that killed it."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}" + (", perhaps for memory" if -code == signal.SIGKILL else "")
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    last = next((line for line in reversed(lines) if line.strip()), f"it ended with code {code}")
    return " ".join(last.split())[:300]
