"""The command line that every command shares: configuration files, dotted overrides, and one line per mistake.

A command builds a parser with `config_parser`, adds its own flags to it, and hands its arguments to `parse`:

    parser = config_parser("ddl bench", "Times a training step.", several=True)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parse(parser, arguments)
    for name, config in read_configs(options): ...

Nothing here imports jax: a mistake is reported before anything slow is loaded.
"""

import argparse
from collections.abc import Callable
import contextlib
import dataclasses
import functools
import inspect
import io
import json
import os
import re
import sys
from typing import Any, Literal, get_args, get_origin

import jsonargparse

from ddl_jax.config import Config
from ddl_jax.config.files import Settings, fields, from_settings, load_file, overlay, similar_names, typed_settings
from ddl_jax.config.rules import shown
from ddl_jax.errors import InputError, RunError, is_out_of_memory
from ddl_jax.stop import interruptible


def plain_parser(command: str, description: str, usage: str) -> jsonargparse.ArgumentParser:
    """A parser that knows `--help` alone, for a command that takes no settings.

    Args:
        command: as typed, for the help.
        description: what the command does, for the help.
        usage: its arguments in one line, for the help.
    """
    return jsonargparse.ArgumentParser(
        prog=command,
        description=description,
        usage=f"%(prog)s {usage}",
        formatter_class=argparse.HelpFormatter,
        exit_on_error=False,
        allow_abbrev=False,
    )


def config_parser(command: str, description: str, several: bool = False) -> jsonargparse.ArgumentParser:
    """A parser that knows `--config FILE` and `--KEY VALUE` for every setting of `Config`.

    Args:
        command: as typed, for the help.
        description: what the command does, for the help.
        several: whether the command compares configurations: positional files, one configuration each.

    Returns:
        The parser, to which a command adds arguments of its own (their names must not be settings).
    """
    files = "[FILE ...] " if several else ""
    parser = plain_parser(command, description, f"{files}[--config FILE ...] [--KEY VALUE ...]")
    if several:
        parser.add_argument("files", nargs="*", metavar="FILE", help="configurations to compare, before any option")
    overlaid = " (over each of the FILEs)" if several else ""
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help=f"YAML file of settings; may be repeated, a later file overlays the earlier{overlaid}",
    )
    groups: dict[str, Any] = {}
    for key, field, section in fields():
        prefix = key.rpartition(".")[0]
        if prefix not in groups:
            groups[prefix] = parser.add_argument_group(
                prefix or "settings", inspect.cleandoc(section.__doc__).split("\n")[0]
            )
        # Kept as text here: `typed_settings` converts files and command line alike.
        groups[prefix].add_argument(
            f"--{key}", metavar=_metavar(field.type), default=argparse.SUPPRESS, help=_help(field, section)
        )
    return parser


def _metavar(hint: Any) -> str:
    options = [hint] if get_origin(hint) in (Literal, tuple) or not get_args(hint) else get_args(hint)
    if get_origin(options[0]) is Literal:
        return "{" + ",".join(get_args(options[0])) + "}"
    return {int: "INT", float: "NUMBER", bool: "{true,false}", str: "TEXT"}.get(options[0], "[ITEM,...]")


def _help(field: dataclasses.Field, section: type) -> str:
    # None follows from other settings; the text says how.
    default = "" if field.default is None else f" [default: {json.dumps(field.default)}]"
    return (attribute_docs(section)[field.name] + default).replace("%", "%%")


def attribute_docs(section: type) -> dict[str, str]:
    """What the "Attributes:" part of a dataclass's docstring says about each field."""
    lines = inspect.cleandoc(section.__doc__).partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", lines, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def parse(parser: jsonargparse.ArgumentParser, arguments: list[str]) -> jsonargparse.Namespace:
    """The parsed arguments of a command; `--help` prints and exits with 0.

    Raises:
        InputError: an unknown option, or an option without its value.
    """
    try:
        return parser.parse_args(arguments)
    except argparse.ArgumentError as error:
        message = " ".join(str(error).split())
    wrong = re.fullmatch(r"""Parser key "(\w+)": Expected a <class '(int|float)'>. Got value: (.*)""", message)
    if wrong:
        kind = {"int": "a whole number", "float": "a number"}[wrong[2]]
        raise InputError(f"--{wrong[1].replace('_', '-')} {shown(wrong[3])} is not {kind}")
    unknown = re.match(r"[Uu]nrecognized arguments: (.*)", message)
    if not unknown:
        raise InputError(message)
    word = unknown[1].split(" ")[0].partition("=")[0]
    if not word.startswith("-"):
        raise InputError(f"unexpected argument {shown(word)}; settings are given as --KEY VALUE, after any files")
    below = [key for key, _, _ in fields() if key.startswith(f"{word.lstrip('-')}.")]
    if below:
        raise InputError(f"{word} is a section, not a setting; did you mean '--{below[0]}'?")
    options = re.findall(r"^ +(?:-\w, )?--([\w.-]+)", parser.format_help(), flags=re.MULTILINE)
    similar = " or ".join(f"'--{name}'" for name in similar_names(word.lstrip("-"), options))
    raise InputError(f"unknown option {shown(word)}; " + (f"did you mean {similar}?" if similar else "see --help"))


def read_overrides(options: jsonargparse.Namespace) -> Settings:
    """The settings that the command line names one by one; raises InputError on one of another type."""
    names = {field.name for field in dataclasses.fields(Config)}
    return typed_settings({key: value for key, value in options.as_dict().items() if key in names})


def read_config(options: jsonargparse.Namespace, file: str | None = None) -> Config:
    """The resolved configuration of a command: `file`, then each `--config`, then the overrides.

    Raises:
        InputError: a file cannot be used, or the configuration breaks a rule.
    """
    files = ([file] if file else []) + options.config
    settings = functools.reduce(overlay, [*map(load_file, files), read_overrides(options)], {})
    try:
        return from_settings(settings).resolve()
    except InputError as error:  # of several configurations, say which one
        raise InputError(f"{file}: {error}" if file else str(error)) from None


def read_configs(options: jsonargparse.Namespace) -> list[tuple[str, Config]]:
    """Each configuration a command compares, named by its positional file, or else the one of the `--config` files.

    Args:
        options: from `parse`, with a parser made with `several`.

    Raises:
        InputError: as `read_config`.
    """
    if options.files:
        return [(file, read_config(options, file)) for file in options.files]
    return [("+".join(options.config) or "defaults", read_config(options))]


def exit_code(command: Callable[[], int]) -> int:
    """Runs a command: its exit code, or after one line on stderr 2 (the input cannot be used) or 1
    (interrupted, or the system refuses something, such as to write)."""
    if not os.path.exists("/dev/nvidiactl"):
        # jax's CUDA plugin, installed to compile for GPUs that are elsewhere, would say at length what it misses.
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    # Of a GPU's memory: jax takes three quarters unless told, and `plan` counts on 141 of an H200's 150 GB.
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # its old name
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.95")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write what the terminal's encoding has no letter for
    try:
        with interruptible():
            try:
                return command()
            finally:
                sys.stdout.flush()  # not at the interpreter's end, which would say less clearly what fails
    except InputError as error:
        print(f"error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped at once; what was saved before stays", file=sys.stderr)
        return 1
    except (RunError, OSError) as error:
        if not isinstance(error, BrokenPipeError):  # whoever reads the result has seen enough, as in `| head`
            print(f"failed: {' '.join(str(error).split())}", file=sys.stderr)
        _discard_output()
        return 1
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"failed: out of memory ({' '.join(str(error).split())[:200]})", file=sys.stderr)
        return 1


def _discard_output() -> None:
    """What could not be written would be tried again at the interpreter's end."""
    with contextlib.suppress(OSError):  # also where stdout is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
