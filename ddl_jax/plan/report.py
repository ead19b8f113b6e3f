"""What `ddl plan` prints for people: one configuration in detail, or several in a table, also as Markdown."""

from collections.abc import Iterable, Sequence
import os
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from ddl_jax.published import source
from pallas_kernels import h200, hopper

WIDTH = 100  # columns, where the output is no terminal
LIMITS = {"memory": "memory bandwidth", "compute": "matrix products", "network": "network"}
KINDS = {
    "parameters": "parameters",
    "optimizer": "optimiser state",
    "saved": "saved for backward",
    "rest": "gradients, activations, temporaries",
}
CACHES = {
    "keys_and_values": "keys and values",
    "readers": "token readers",
    "expansion": "expansion",
    "direction": "direction",
}

Result = dict[str, Any]


def show_one(result: Result, baseline: Result, console: Console) -> None:
    """One configuration beside the additive baseline."""
    sequences = f"{result['batch_size']} sequences, {result['microbatch_size']} at a time on each GPU"
    console.print(f"[bold]{result['config']}[/] on {_devices(result)}: {sequences}")
    table = Table(Column("one training step"), box=None, pad_edge=False)
    for title in ("this", "additive", "ratio"):
        table.add_column(title, justify="right")
    for label, *values in _details(result, baseline):
        table.add_row(label, *values)
    console.print(table)
    fits = "fits" if result["fits"] else "does not fit"
    console.print(f"It {fits} into {h200.MEMORY / 1e9:.0f} GB. Bound by: {LIMITS[result['bound']]}.", highlight=False)
    console.print(f"Largest micro-batch: from {result['largest_microbatch_source']}.", highlight=False)
    for line in _settings(result):
        console.print(line, highlight=False)
    console.print(_policies(result["policies"]))
    if result["published"]:
        console.print(f"Published: {_published(result)} ({source('costs')}).", highlight=False)


def _policies(choices: Sequence[dict[str, Any]]) -> Table:
    """What each choice would keep of a micro-batch for backward, and what it computes again."""
    table = Table(Column("policies: remat"), box=None, pad_edge=False)
    for title in ("backward", "products", "state"):
        table.add_column(title)
    for title in ("keeps", "computes again"):
        table.add_column(title, justify="right")
    for choice in choices:
        again = f"{choice['again']:.1%} of FLOPs" if choice["again"] else "no products"
        backward = choice["backward"] or "–"
        names = choice["remat"], backward, choice["compute_dtype"], choice["state_dtype"]
        style = "bold" if choice["chosen"] else None
        mark = " *" if choice["chosen"] else ""
        table.add_row(*names, _gigabytes(choice["kept_bytes"]), again + mark, style=style)
    return table


def _settings(result: Result) -> Iterable[str]:
    """What was decided, and what it keeps for backward."""
    stream = f"; the stream's operations: {result['kernels']}" if result["kernels"] else ""
    dtypes = f"{result['compute_dtype']} products, {result['state_dtype']} state"
    yield f"Attention: {result['attention']}{stream}; {dtypes}."
    state = f", residual.backward: {result['backward']}" if result["backward"] else ""
    total = result["peak_bytes_by_kind"]["saved"]
    shown = [f"{name} {_gigabytes(moved)}" for name, moved in result["saved_arrays"].items() if moved > total / 50]
    yield f"Kept for backward with remat: {result['remat']}{state}: " + (", ".join(shown) or "not known without a scan")


def _details(result: Result, baseline: Result) -> Iterable[tuple[str, str, str, str]]:
    def row(label, show, name, *keys):
        ours, theirs = result[name], baseline[name]
        for key in keys:
            ours, theirs = ours.get(key), theirs.get(key)
        ratio = f"{ours / theirs:.3f}" if ours is not None and theirs else ""
        return label, "–" if ours is None else show(ours), "–" if theirs is None else show(theirs), ratio

    yield row("parameters", _millions, "parameters")
    yield row("FLOPs per token, by formula", _giga, "flops_per_token")
    yield row("FLOPs per token, matrix products of the program", _giga, "executed_flops_per_token")
    yield row("peak memory per GPU", _gigabytes, "peak_bytes_per_device")
    for kind, label in KINDS.items():
        yield row(f"  {label}", _gigabytes, "peak_bytes_by_kind", kind)
    yield row("largest micro-batch per GPU", str, "largest_microbatch")
    yield row("bytes to and from memory, per GPU", _gigabytes, "hbm_bytes_per_step")
    yield row("bytes sent to other GPUs, per GPU", _gigabytes, "collective_bytes_per_step")
    yield row("least time", _milliseconds, "roofline_seconds")
    for limit, label in LIMITS.items():
        yield row(f"  by {label}", _milliseconds, "seconds_by_limit", limit)
    yield row("residual state of a micro-batch", _gigabytes, "state_bytes")
    yield row("caches to generate a micro-batch", _gigabytes, "cache_bytes")
    for kind, label in CACHES.items():
        if kind in result["cache_bytes_by_kind"]:
            yield row(f"  {label}", _gigabytes, "cache_bytes_by_kind", kind)


def show_moved(result: Result, parts: Sequence[hopper.Part], console: Console) -> None:
    """Where the bytes go."""
    table = Table(Column(f"{result['config']}: bytes by kind"), box=None, pad_edge=False)
    table.add_column("GB", justify="right")
    table.add_column("share", justify="right")
    for kind, moved in result["hbm_bytes_by_kind"].items():
        table.add_row(kind, f"{moved / 1e9:,.2f}", f"{moved / result['hbm_bytes_per_step']:.1%}")
    console.print(table)
    table = Table(box=None, pad_edge=False)
    for title in ("runs", "GB"):
        table.add_column(title, justify="right")
    for title, width in (("instruction", 22), ("makes", 26), ("from", 34)):
        table.add_column(title, no_wrap=True, width=width)
    for part in parts:
        table.add_row(str(part.runs), f"{part.bytes / 1e9:,.2f}", part.name, part.shape, _end(part.path))
    console.print(table)


def _end(path: str) -> str:
    """The end of where an instruction comes from, and of which pass it is."""
    phase = "backward: " if "transpose(" in path else "forward: " if "jvp(" in path else ""
    return phase + "/".join(part for part in path.split("/")[-2:] if part not in ("body", "eval_jaxpr", "while"))


TITLES = (
    "configuration", "size", "GFLOP /token", "peak memory, GB", "moved, GB", "least time, ms", "fits",
    "paper: memory / speed",
)  # fmt: skip


def _rows(results: Sequence[Result]) -> Iterable[tuple[str, ...]]:
    folder = os.path.commonpath([os.path.dirname(os.path.abspath(result["config"])) for result in results])
    for result in results:
        ratio, paper = result["baseline_ratio"], result["published"]
        yield (
            os.path.relpath(result["config"], folder).removesuffix(".yaml"),
            f"{result['parameters'] / 1e6:.1f} M",
            f"{result['executed_flops_per_token'] / 1e9:.3f}",
            f"{result['peak_bytes_per_device'] / 1e9:.1f} ({ratio['peak_bytes_per_device']:.2f})",
            f"{result['hbm_bytes_per_step'] / 1e9:,.0f} ({ratio['hbm_bytes_per_step']:.2f})",
            f"{1e3 * result['roofline_seconds']:,.0f} ({1 / ratio['roofline_seconds']:.2f})",
            f"{result['largest_microbatch']}",
            f"{paper['memory_factor']:.2f} / {paper['throughput_ratio']:.2f}" if paper else "–",
        )


def show_several(results: Sequence[Result], console: Console) -> None:
    """Several configurations, one a line."""
    rows = list(_rows(results))
    table = Table(Column(TITLES[0], overflow="fold"), box=None, pad_edge=False)
    for title, *cells in list(zip(TITLES, *rows, strict=True))[1:]:
        table.add_column(title, justify="right", width=max(map(len, [*title.split(), *cells])))
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for line in _notes(results):
        console.print(line, highlight=False)


def markdown(results: Sequence[Result]) -> str:
    """The table of `show_several`, as Markdown."""
    lines = [TITLES, ("---", *["---:"] * (len(TITLES) - 1)), *_rows(results)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return table + "\n\n" + "\n".join(_notes(results)) + "\n"


def _notes(results: Sequence[Result]) -> Iterable[str]:
    settings = {(_devices(r), r["batch_size"], r["microbatch_size"]) for r in results}
    for devices, batch, micro in sorted(settings):
        yield f"On {devices}: {batch} sequences a step, {micro} at a time on each GPU. Memory and bytes are per GPU."
    yield "In brackets: ratios to the same with kind: additive, for the time that of speeds. No time was measured."
    for config in (result["config"] for result in results if not result["fits"]):
        yield f"{config} does not fit into {h200.MEMORY / 1e9:.0f} GB."
    yield f"Fits: the largest micro-batch that does, from {results[0]['largest_microbatch_source']}."
    if any(result["published"] for result in results):
        yield f"Paper: {source('costs')}."


def _devices(result: Result) -> str:
    return "1 H200" if result["devices"] == 1 else f"{result['devices']} H200s"


def _published(result: Result) -> str:
    paper = result["published"]
    return f"{paper['memory_factor']:.2f} times the baseline's memory at {paper['throughput_ratio']:.2f} of its speed"


def _millions(number: float) -> str:
    return f"{number / 1e6:,.2f} M"


def _giga(number: float) -> str:
    return f"{number / 1e9:,.3f} G"


def _gigabytes(number: float) -> str:
    return f"{number / 1e9:,.2f} GB" if number >= 1e7 or not number else f"{number / 1e6:,.2f} MB"


def _milliseconds(number: float) -> str:
    return f"{1e3 * number:,.2f} ms"
