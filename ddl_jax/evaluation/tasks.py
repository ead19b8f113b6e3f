"""Tasks of lm-evaluation-harness: found, their data sets at hand, and run."""

from collections.abc import Sequence
import contextlib
import logging
from numbers import Real
from pathlib import Path
import sys

import lm_eval
import lm_eval.tasks
from lm_eval.tasks import TaskManager

from ddl_jax.errors import InputError, did_you_mean
from ddl_jax.evaluation import paper
from ddl_jax.evaluation.harness import HarnessModel
from ddl_jax.evaluation.hub import recipe

RESAMPLES = 1000  # for the standard errors of metrics that are no means

Metrics = dict[str, float]


def find_tasks(names: Sequence[str], include_path: Path | None) -> TaskManager:
    """A manager that knows all the tasks, groups and tags named.

    Args:
        names: as `--tasks` has them.
        include_path: a folder of tasks of one's own. Where all are found there, or all are the paper's, the library's
            thousands are not read.

    Raises:
        InputError: one of the names is unknown.
    """
    _quieten_library()
    library = Path(lm_eval.tasks.__file__).parent
    folders = [library / name for name in paper.FOLDERS] if include_path is None else [include_path]
    few = TaskManager(include_path=[str(folder) for folder in folders if folder.is_dir()], include_defaults=False)
    if set(names) <= set(few.all_tasks):
        return few
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    for name in names:
        if name not in manager.task_index:
            raise InputError(f"--tasks {name!r} is no task{_meant(name, manager.all_tasks)}")
    return manager


def _meant(name: str, known: Sequence[str]) -> str:
    said, all_of_them = did_you_mean(name, known), "; https://github.com/EleutherAI/lm-evaluation-harness lists them"
    return said if said.startswith("; did you mean") else all_of_them


def require_data(manager: TaskManager, names: Sequence[str], shots: int | None) -> None:
    """Loads all tasks once, so that what cannot be had is known before anything is computed.

    Args:
        manager: knows the names.
        names: of tasks, groups and tags.
        shots: solved examples that each task is to have; None where each has what it says itself.

    Raises:
        InputError: with a data set that cannot be had; of those on the hub it says all, and how to bring them here. Or
            a task is named twice, also as part of a group, or has too few solved examples.
    """
    missing: dict[str, tuple[str, str | None]] = {}
    for name in names:
        try:
            manager.load([name])
        except Exception as error:  # the libraries raise nothing more specific than what a task's own code may raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            settings = manager.task_index[name].cfg or {}
            path = str(settings.get("dataset_path"))
            if not isinstance(error, OSError) or "/" not in path or Path(path).exists():
                raise InputError(f"--tasks {name!r} cannot be loaded: {reason}") from error
            missing[name] = (path, settings.get("dataset_name"))
            first = reason if len(missing) == 1 else first
    if missing:
        them = f"the data sets of {', '.join(missing)} are" if len(missing) > 1 else f"the data set of {name} is"
        raise InputError(f"{them} not on this machine, and cannot be fetched ({first}); {recipe(missing.values())}")
    try:
        tasks = manager.load(list(names))["tasks"]
    except ValueError as error:
        raise InputError(f"--tasks {','.join(names)!r}: {' '.join(str(error).split())}; name each once") from None
    for name, task in tasks.items() if shots else ():
        solved = len(task.fewshot_docs() or ())
        if solved <= shots:
            raise InputError(
                f"--num-fewshot {shots}: task {name!r} has {solved} solved examples, of which one may be the question "
                f"itself; nearest: {max(solved - 1, 0)}"
            )


def run_tasks(
    model: HarnessModel, manager: TaskManager, names: Sequence[str], shots: int | None, limit: int | None
) -> dict[str, Metrics]:
    """The metrics of each task and group.

    Args:
        model: the run.
        manager: knows the names.
        names: of tasks, groups and tags.
        shots: solved examples before each question; by default what the task says.
        limit: questions of each task; by default all.

    Returns:
        By name: `num_fewshot`, `samples`, and each metric with its `_stderr`, as fractions. Of another filter than the
        library's first, a metric's name ends with a comma and the filter.
    """
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=list(names),
            task_manager=manager,
            num_fewshot=shots,
            limit=limit,
            bootstrap_iters=RESAMPLES,
            log_samples=False,
        )
    return {name: _metrics(name, found, metrics) for name, metrics in found["results"].items()}


def _metrics(name: str, found: dict, metrics: dict) -> Metrics:
    samples = found["n-samples"]
    known = {"num_fewshot": found["n-shot"][name]} if name in found["n-shot"] else {}
    known |= {"samples": samples[name]["effective"]} if name in samples else {}
    figures = {key: value for key, value in metrics.items() if isinstance(value, Real) and key != "sample_len"}
    return known | {key.removesuffix(",none"): float(value) for key, value in figures.items()}


def _quieten_library() -> None:
    """What it warns of is what it was asked for: another number of shots than a task's own."""
    for name in ("lm_eval", "datasets", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
