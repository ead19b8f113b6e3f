"""`ddl prepare`: text to token shards, in as many processes as there are processors, resumed by the same command."""

import json
import os
import sys
import time
from typing import Any

import jsonargparse

from ddl_jax.command_line import attribute_docs, parse, plain_parser
from ddl_jax.config.preparation import PreparationConfig
from ddl_jax.config.rules import shown
from ddl_jax.duration import duration
from ddl_jax.errors import InputError
from ddl_jax.stop import StopRequest

SAID_EVERY = 10.0  # seconds, where nobody watches a progress bar
DONE, STOPPED = 0, 3


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code: 0 done, 3 stopped on request."""
    with StopRequest() as stop:
        options = parse(_parser(), arguments)
        config = _read(options)
        from ddl_jax.data.preparation import prepare_shards  # after parsing, so that a mistake is reported at once

        begun = time.monotonic()
        with _Display() as display:
            index = prepare_shards(config, lambda: bool(stop), display.report)
    if index is None:
        print(f"stopped; the same command goes on in {config.out}", file=sys.stderr)
        return STOPPED
    if not index["validation_tokens"]:
        _warn(index)
    result = _result(config, index, display.written, time.monotonic() - begun)
    if options.json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        _show(result)
    return DONE


def _parser() -> jsonargparse.ArgumentParser:
    docs = attribute_docs(PreparationConfig)
    parser = plain_parser(
        "ddl prepare",
        "Makes token shards of text, in llm.c's .bin layout, with an index of documents. Parquet, JSON lines "
        "(.jsonl, .ndjson, .json) and text files (a file is a document), the latter two also as .gz or .zst. The same "
        "command again goes on where it was stopped.",
        "SOURCE [SOURCE ...] --out DIR --tokenizer NAME [options]",
    )
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help=docs["sources"])
    for option, metavar, default in (
        ("out", "DIR", None),
        ("tokenizer", "NAME", None),
        ("text_field", "NAME", PreparationConfig.text_field),
        ("validation_fraction", "NUMBER", PreparationConfig.validation_fraction),
        ("shard_tokens", "INT", PreparationConfig.shard_tokens),
        ("workers", "INT", "one for each processor"),
    ):
        said = "" if default is None else f" [default: {default}]"
        help = (docs[option] + said).replace("%", "%%")
        parser.add_argument(f"--{option.replace('_', '-')}", metavar=metavar, default=None, help=help)
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else on stdout")
    return parser


def _read(options: jsonargparse.Namespace) -> PreparationConfig:
    for name, example in (("out", "shards"), ("tokenizer", "gpt2")):
        if options[name] is None:
            raise InputError(f"--{name} is missing, e.g. --{name} {example}")
    given = {
        "text_field": options.text_field,
        "validation_fraction": _number(options.validation_fraction, "--validation-fraction", float),
        "shard_tokens": _number(options.shard_tokens, "--shard-tokens", int),
        # Not all of the machine's, where a scheduler lends some of them.
        "workers": _number(options.workers or str(len(os.sched_getaffinity(0))), "--workers", int),
    }
    config = PreparationConfig(
        sources=tuple(options.sources),
        out=options.out,
        tokenizer=options.tokenizer,
        **{name: value for name, value in given.items() if value is not None},
    )
    config.validate()
    return config


def _number(text: str | None, option: str, kind: type) -> Any:
    try:
        return None if text is None else kind(text)
    except ValueError:
        raise InputError(
            f"{option} {shown(text)} must be {'a number' if kind is float else 'a whole number'}"
        ) from None


class _Display:
    """Bytes read, speed and the time that is left: a bar on a terminal, a line now and then elsewhere, on stderr."""

    def __init__(self):
        from rich import progress
        from rich.console import Console

        self.written = 0
        self._begun = self._said = time.monotonic()
        self._first: tuple[int, int] | None = None
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = progress.Progress(
            progress.BarColumn(bar_width=None),
            progress.DownloadColumn(),
            progress.TextColumn("{task.fields[tokens]} tokens, {task.fields[speed]} tokens/s"),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, tokens="0", speed="—")

    def __enter__(self) -> "_Display":
        self._bar.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._bar.__exit__(*error)

    def report(self, total: int, read: int, tokens: int, new: int) -> None:
        """Takes up where the work stands: bytes of the sources, those that were read, tokens there and new ones."""
        now = time.monotonic()
        if self._first is None:
            self._first = read
        self.written += new
        seconds = max(now - self._begun, 1e-9)
        speed = f"{self.written / seconds:,.0f}"
        self._bar.update(self._task, total=total, completed=read, tokens=f"{tokens:,}", speed=speed)
        if not self._console.is_terminal and now - self._said > SAID_EVERY:
            self._said = now
            left = (total - read) * seconds / max(read - self._first, 1)
            self._console.print(
                f"read {read / 1e6:,.1f} of {total / 1e6:,.1f} MB   {tokens:,} tokens   {speed} tokens/s   "
                f"{duration(left)} left"
            )


def _warn(index: dict) -> None:
    documents, fraction = index["train_documents"], index["validation_fraction"]
    if fraction:
        print(
            f"none of {documents:,} documents was held out at --validation-fraction {fraction}; training will hold out "
            "the end of each shard instead",
            file=sys.stderr,
        )


def _result(config: PreparationConfig, index: dict, tokens: int, seconds: float) -> dict:
    """What `--json` prints."""
    counts = ("train_tokens", "validation_tokens", "train_documents", "validation_documents", "empty_documents")
    return {
        "out": config.out,
        "shards": len(index["shards"]),
        **{name: index[name] for name in counts},
        "text_bytes": index["text_bytes"],
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }


def _show(result: dict) -> None:
    rows = [
        f"{name.replace('_', ' '):22}{value:,.0f}" for name, value in result.items() if name not in ("out", "seconds")
    ]
    print("\n".join(rows))
    print(f"in {result['out']}; to train on them: --data.corpus shards --data.paths '{result['out']}/*.bin'")
