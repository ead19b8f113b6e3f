"""Checkpoints: saved in the background, restored from the newest that can be read, by others without a trace."""

from collections.abc import Callable
import inspect
import logging
from pathlib import Path
import shutil
import sys
import threading

from flax import nnx
import jax
import orbax.checkpoint as ocp

from ddl_jax.errors import InputError, RunError
from ddl_jax.training.distributed import together, writes

KEPT = 3  # newest checkpoints that stay on disk


def _quieten_storage() -> None:
    """What the storage prints when a write fails: tracebacks around the one line that we print of the same error."""
    logging.getLogger("absl").addFilter(_not_of_orbax)
    logging.getLogger("asyncio").addFilter(_not_an_abandoned_task)
    if sys.unraisablehook is not _without_closed_loops:
        _without_closed_loops.otherwise = sys.unraisablehook
        sys.unraisablehook = _without_closed_loops  # for good: its threads go on for a while


def _not_of_orbax(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR or "orbax" not in record.pathname


def _not_an_abandoned_task(record: logging.LogRecord) -> bool:
    return "exception was never retrieved" not in record.getMessage()


def _without_closed_loops(unraisable) -> None:
    # What one array could not be read for is said; the reading of others was given up, and says it again as it goes.
    given_up = inspect.iscoroutine(unraisable.object) and "orbax" in unraisable.object.cr_code.co_filename
    if not given_up and "Event loop is closed" not in str(unraisable.exc_value):
        _without_closed_loops.otherwise(unraisable)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:600] or type(error).__name__


def read_parameters(directory: Path, abstract, say: Callable[[str], None]) -> tuple[int, nnx.State]:
    """The parameters of the newest checkpoint that can be read, and its step.

    Nothing is written: a process may be training there. The optimiser's state stays on disk.

    Args:
        directory: of the run's checkpoints, which may not exist.
        abstract: the parameters' structure, as of `jax.eval_shape`, with shardings of any devices.
        say: called with a line of text where an older one is read in place of the newest.

    Raises:
        InputError: there is no checkpoint yet, or none can be read.
    """
    names = (path.name for path in directory.iterdir()) if directory.is_dir() else ()
    steps = sorted((int(name) for name in names if name.isdecimal()), reverse=True)  # others are not complete
    if not steps:
        raise InputError(f"{str(directory)!r} holds no checkpoint yet; train first, to training.checkpoint_every")
    _quieten_storage()
    damaged: list[str] = []
    for step in steps:
        try:
            parameters = _read_parameters(directory.absolute() / str(step), abstract)
        except Exception as error:  # whatever the storage underneath raises on damaged files
            damaged.append(f"checkpoint {step} cannot be read: {_reason(error)}")
            continue
        for text in damaged:
            say(f"{text}; reading checkpoint {step}")
        return step, parameters
    raise InputError(f"none of the checkpoints in {str(directory)!r} can be read: {damaged[0]}")


def _read_parameters(checkpoint: Path, abstract) -> nnx.State:
    wanted = {"parameters": abstract}
    how = ocp.checkpoint_utils.construct_restore_args(wanted)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        arguments = ocp.args.PyTreeRestore(item=wanted, restore_args=how, partial_restore=True)
        return jax.block_until_ready(checkpointer.restore(checkpoint / "state", args=arguments)["parameters"])


class Checkpoints:
    """The checkpoints of one run, by step. For a `with` statement, which waits for the last save.

    Args:
        directory: where they are kept.
        say: called with a line of text where something is worth telling.
        timeout: seconds in which all processes have to have written their parts, where there are several.
    """

    def __init__(self, directory: Path, say: Callable[[str], None], timeout: int = 300):
        self._say = say
        self._directory = directory.absolute()
        waits = ocp.AsyncOptions(timeout_secs=timeout) if jax.process_count() > 1 else None
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, enable_async_checkpointing=True, async_options=waits)
        self._watch: threading.Thread | None = None  # waits for the save under way; Orbax tells of failures only there
        self._failure: Exception | None = None
        self._manager = ocp.CheckpointManager(self._directory, options=options)

    def __enter__(self) -> "Checkpoints":
        _quieten_storage()
        return self

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, RunError) and jax.process_count() > 1:
            return  # the storage of this process may wait for that of another, which has failed
        try:
            self._manager.close()
        except Exception:
            if error is None:  # what stopped the run matters more than what closing it ran into
                raise

    @property
    def newest(self) -> int | None:
        """The step of the newest checkpoint that is whole, or None. Waits for a save under way."""
        self.wait()
        return self._manager.latest_step()

    def save(self, step: int, state) -> None:
        """Begins to save; the files appear under their final name only once complete.

        Raises:
            RunError: this save, or the one before it, failed.
        """
        self.wait()
        if step in self._manager.all_steps():
            return
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(state))
        self._attempt(lambda: self._manager.save(step, args=arguments, force=True))
        self._watch = threading.Thread(target=self._attempt, args=[self._manager.wait_until_finished], daemon=True)
        self._watch.start()
        self.check()

    def wait(self) -> None:
        """Waits until what was begun is on disk; raises RunError if that failed."""
        if self._watch is not None:
            self._watch.join()
        self.check()

    @property
    def failed(self) -> bool:
        """Whether a save has failed, also one in the background."""
        return self._failure is not None

    def check(self) -> None:
        """Raises RunError if a save has failed, also one in the background."""
        if self._failure is not None:
            reason = f"saving a checkpoint in {self._directory} failed: {_reason(self._failure)}"
            raise RunError(reason) from self._failure

    def _attempt(self, action: Callable) -> None:
        try:
            action()
        except Exception as error:  # whatever the storage underneath raises
            self._failure = error

    def restore(self, abstract):
        """The newest readable state, or None where there is no checkpoint at all.

        A checkpoint that cannot be read is moved aside, to `damaged_checkpoints`, with a line that says so.

        Args:
            abstract: the state's structure, as of `jax.eval_shape`, with shardings.

        Raises:
            RunError: there are checkpoints, but none can be read.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        damaged: list[tuple[int, str]] = []
        for step in steps:
            try:
                state = together(lambda step=step: self._read(step, abstract))
            except RunError as error:
                damaged.append((step, str(error)))
                continue
            for bad, reason in damaged:
                self._say(f"checkpoint {bad} cannot be read, falling back to checkpoint {step}: {reason}")
                together(lambda bad=bad: self._set_aside(bad))
            return state
        if damaged:
            step, reason = damaged[0]
            raise RunError(f"none of the checkpoints in {self._directory} can be read; the newest, {step}: {reason}")
        return None

    def _read(self, step: int, abstract):
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract)))
            return jax.block_until_ready(restored["state"])
        except Exception as error:  # whatever the storage underneath raises on damaged files
            raise RunError(_reason(error)) from error

    def _set_aside(self, step: int) -> None:
        if writes():
            damaged = self._directory.parent / "damaged_checkpoints"
            damaged.mkdir(exist_ok=True)
            target = damaged / str(step)
            count = 1
            while target.exists():
                count += 1
                target = damaged / f"{step}-{count}"
            shutil.move(self._directory / str(step), target)
        self._manager.reload()
