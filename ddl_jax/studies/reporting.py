"""`ddl study report`: what a study has found, from its directory alone."""

from collections import Counter
import importlib.util
import json
from pathlib import Path
import sys

from rich.console import Console
from rich.table import Table

from ddl_jax.atomic import write_atomically
from ddl_jax.command_line import parse, plain_parser
from ddl_jax.config.rules import plain_path
from ddl_jax.config.study import load_study
from ddl_jax.errors import InputError
from ddl_jax.studies import tables
from ddl_jax.studies.analysis import summarize
from ddl_jax.studies.page import page
from ddl_jax.studies.results import read_record
from ddl_jax.studies.sections import html_sections, markdown, parts
from ddl_jax.studies.summary import Summary, document

SHOWN = ("A − B", "seeds", "mean", "95 % t interval", "p (Holm)")  # in a terminal, for its width
NUMBERS, TEXT, PAGE = "summary.json", "report.md", "index.html"


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = plain_parser(
        "ddl study report",
        "Says what a study has found so far: summary.json, report.md, pictures, and all of it in index.html. Reads the "
        "folder of its runs and nothing else; checkpoints may be gone.",
        "DIR|STUDY.yaml [--out FOLDER] [--json]",
    )
    parser.add_argument("study", nargs="?", metavar="DIR|STUDY.yaml", help="the folder of a study's runs, or its file")
    parser.add_argument("--out", metavar="FOLDER", help="where to write [default: DIR/report]")
    parser.add_argument("--json", action="store_true", help="print summary.json and nothing else on stdout")
    options = parse(parser, arguments)
    if options.study is None:
        raise InputError("a study is missing; name the folder of its runs, or its file")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("pictures need the package 'matplotlib', which is not installed; pip install -e '.[plots]'")
    folder = _folder(options.study)
    record = read_record(folder)
    out = folder / "report" if options.out is None else Path(options.out).expanduser()
    _require_ours(out)
    summary = summarize(record)
    text = json.dumps(document(summary), indent=1, allow_nan=False) + "\n"
    _write(out, summary, text)
    if options.json:
        sys.stdout.write(text)
    else:
        _show(summary, out)
    return 0


def _folder(study: str) -> Path:
    path = Path(study).expanduser()
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        return Path(load_study(path).run_dir).expanduser()
    return path


def _require_ours(out: Path) -> None:
    """Raises InputError where writing a report would mix it with something else."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {plain_path(out)} is not a folder; name another")
    if out.is_dir() and any(out.iterdir()) and not (out / NUMBERS).is_file():
        raise InputError(f"--out {plain_path(out)} holds something else than a report; name another folder")


def _write(out: Path, summary: Summary, text: str) -> None:
    from ddl_jax.studies.plots import pictures

    drawn = pictures(summary)
    found = parts(summary, drawn)
    title = summary.question
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / NUMBERS, text)
    for file in out.glob("*.png"):  # of an earlier report, perhaps of readings that are no more
        if file.stem not in drawn:
            file.unlink()
    for name, data in drawn.items():
        write_atomically(out / f"{name}.png", data)
    write_atomically(out / TEXT, markdown(title, found))
    write_atomically(out / PAGE, page(title, html_sections(found, drawn)))


def _show(summary: Summary, out: Path) -> None:
    """Prints the state and the differences, for people."""
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    console.print(summary.question, soft_wrap=True)
    console.print(f"{summary.runs_finished} of {summary.runs_planned} runs have finished.")
    for state in ("diverged", "failed", "half-done", "not begun"):
        runs = Counter(f"{run.arm} seed {run.seed}" for run in summary.missing if run.state == state)
        if runs:
            first = runs.most_common(6)
            named = ", ".join(name if n == 1 else f"{name} ({n} runs)" for name, n in first)
            rest = runs.total() - sum(n for _, n in first)
            console.print(f"{state.upper()}, left out: {named}{f' and {rest} more' if rest else ''}", soft_wrap=True)
    for reading in summary.readings:
        found = tables.differences(reading)
        columns = [found.header.index(name) for name in SHOWN]
        console.print(f"\n{reading.name}, nats per token")
        table = Table(box=None, pad_edge=False)
        for name in SHOWN:
            table.add_column(name, justify="left" if name == SHOWN[0] else "right", no_wrap=True)
        for row in found.rows:
            table.add_row(*(row[column] for column in columns))
        console.print(table)
    console.print(f"\nWritten: {out / PAGE}, {TEXT}, {NUMBERS} and pictures", soft_wrap=True)
