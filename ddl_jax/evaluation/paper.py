"""The paper's eight tasks: which figure of each, and the published rows beside them."""

from collections.abc import Mapping
import statistics

from ddl_jax.config import TransformerConfig
from ddl_jax.published import accuracies, size

NAME = "paper"  # what stands for the eight in --tasks
SHOTS = {0: "zero_shot", 1: "one_shot"}
# Its tables' columns, in their order.
TASKS = (
    "arc_challenge", "arc_easy", "hellaswag", "openbookqa", "piqa", "sciq", "social_iqa", "winogrande",
)  # fmt: skip
# The harness's own folders with these tasks: looking there alone takes no time, among its thousands ten seconds.
FOLDERS = ("arc", "hellaswag", "openbookqa", "piqa", "sciq", "siqa", "winogrande")
AVERAGE = "average"  # the macro average: every task counts the same


def figures(metrics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The row of a run: per cent of each task's questions, and their average.

    The paper does not say which of the library's two accuracies it gives. As is common: `acc_norm`, for which the
    log-likelihood of an answer is divided by its length, and `acc` where a task has no other.

    Args:
        metrics: by task, as of `run_tasks`.
    """
    found = {task: 100 * metrics[task][metric(metrics[task])] for task in TASKS}
    return found | {AVERAGE: statistics.fmean(found.values())}


def metric(metrics: Mapping[str, float]) -> str:
    """Which of a task's metrics the row has."""
    return "acc_norm" if "acc_norm" in metrics else "acc"


def published_rows(config: TransformerConfig, shots: int) -> dict[str, dict[str, float]]:
    """The paper's rows by variant, for models of the same size; none for a model of another size."""
    found = size(config)
    return accuracies(found, shots) if found else {}
