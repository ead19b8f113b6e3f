"""What `ddl evaluate` prints for people."""

from collections.abc import Iterable, Mapping
import sys

from rich.console import Console
from rich.table import Column, Table

from ddl_jax.config import TransformerConfig
from ddl_jax.evaluation import paper
from ddl_jax.published import SIZES, size, source, validation_losses

Result = dict  # the document that `--json` prints


def show(result: Result, config: TransformerConfig) -> None:
    """Prints a result on stdout.

    Args:
        result: of `ddl evaluate`.
        config: of the model.
    """
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)  # a file does not wrap
    console.print(f"{result['run']}, step {result['step']:,}", soft_wrap=True)
    if result["validation_loss"] is not None:
        console.print(
            f"Held-out text: {result['validation_loss']:.4f} nats/token, perplexity {result['perplexity']:.2f}, "
            f"{result['bits_per_byte']:.4f} bits/byte, over {result['validation_tokens']:,} tokens"
        )
        if size(config):
            rows = ", ".join(f"{name} {loss:.4f}" for name, loss in validation_losses(size(config)).items())
            console.print(f"The paper's models of this size, on its own text: {rows} nats/token", soft_wrap=True)
    if "skipping" in result:
        console.print(_skipping(result["skipping"]), soft_wrap=True)
    if "paper" in result:
        _show_paper(result["paper"], config, console)
    elif result["tasks"]:
        console.print(_tasks(result["tasks"]))


def _skipping(cost: Mapping[str, float]) -> str:
    full, without = cost["milliseconds_per_token"], cost["skipping_milliseconds_per_token"]
    return (
        f"Without edits whose gate is below {cost['skip_below']}: {cost['loss_change']:+.4f} nats/token, the same "
        f"likeliest token after {cost['agreement']:.2%} of tokens; one row at a time, {cost['skipped_share']:.1%} of "
        f"sublayers skipped, {without:.3f} ms per token instead of {full:.3f}"
    )


def _tasks(tasks: Mapping[str, Mapping[str, float]]) -> Table:
    right = [Column(title, justify="right") for title in ("shots", "questions")]
    table = Table("task", *right, "metric", Column("value", justify="right"), "standard error", box=None)
    for name, metrics in tasks.items():
        counts = [f"{metrics[key]:,}" if key in metrics else "" for key in ("num_fewshot", "samples")]
        for metric, value, error in _values(metrics):
            table.add_row(name, *counts, metric, f"{value:.4f}", error)
    return table


def _values(metrics: Mapping[str, float]) -> Iterable[tuple[str, float, str]]:
    for key, value in metrics.items():
        name, comma, rest = key.partition(",")
        if key in ("num_fewshot", "samples") or name.endswith("_stderr"):
            continue
        error = f"{name}_stderr{comma}{rest}"
        yield key, value, f"± {metrics[error]:.4f}" if error in metrics else ""


def _show_paper(rows: Mapping[str, Mapping], config: TransformerConfig, console: Console) -> None:
    columns = (*paper.TASKS, paper.AVERAGE)
    for shots, name in paper.SHOTS.items():
        titles = [Column(title.replace("_", " "), justify="right", min_width=5) for title in columns]
        table = Table(Column(name.replace("_", "-"), min_width=9), *titles, box=None, pad_edge=False)
        for row, found in {"this run": rows[name], **paper.published_rows(config, shots)}.items():
            table.add_row(row, *(f"{found[column]:.2f}" for column in columns))
        console.print()
        console.print(table)
    console.print("Per cent: acc_norm where a task has it, else acc. average: of the eight tasks, each counted once.")
    if size(config):
        console.print(f"The other rows: {source()}.")
    else:
        known = " or ".join(f"{name} ({L} layers, width {d})" for (L, d, *_), name in SIZES.items())
        console.print(f"No published rows beside it: the paper's models are {known}.")
