"""Configurations as YAML: reading files into settings, writing a configuration out, and comparing two of them.

Settings are nested dictionaries in the shape of `Config`, holding only what a file or the command line names. Every
scalar of a file is text until its field's annotation says what it means: `run_dir: 2026` is a folder, not a number.
"""

from collections.abc import Iterable, Iterator
import dataclasses
import difflib
import functools
import os
from pathlib import Path
import re
from typing import Any, get_origin

import jsonargparse
import yaml

from ddl_jax.config.distributed import DistributedConfig
from ddl_jax.config.experiment import Config
from ddl_jax.config.mesh import MeshConfig
from ddl_jax.config.rules import expected, fits, plain, plain_path, shown
from ddl_jax.errors import InputError

Settings = dict[str, Any]

# A run resumed in its own directory may change how often it reports and how it is carried out, never what is trained.
RESUMABLE = (
    "run_dir",  # the same folder, perhaps spelled differently
    "model.remat",
    "model.residual.backward",
    "model.residual.kernel",
    "data.workers",
    "training.microbatch_size",
    "training.log_every",
    "training.evaluate_every",
    "training.checkpoint_every",
    *(f"mesh.{field.name}" for field in dataclasses.fields(MeshConfig)),
    *(f"distributed.{field.name}" for field in dataclasses.fields(DistributedConfig)),
)
# What processes that train together may each have of their own: where they are, and where they find the same files.
LOCAL = (
    "run_dir",
    "data.paths",
    "data.workers",
    *(f"distributed.{field.name}" for field in dataclasses.fields(DistributedConfig)),
)
# Newer than the first runs, whose config.yaml lacks them: what these keys are by default is what those runs did.
NEWER = ("model.head_norm", "model.output_gate", "model.logit_base_width", "model.residual.dynamic")
# Settled when a run starts; these values ask for whatever that was.
SETTLED = {"model.vocab_size": None, "model.compute_dtype": "auto", "model.state_dtype": "auto"}


def fields(section: type = Config, path: str = "") -> Iterator[tuple[str, dataclasses.Field, type]]:
    """Each setting below a section: its dotted key, its field, and the dataclass it stands in (for its docstring)."""
    for field in dataclasses.fields(section):
        if dataclasses.is_dataclass(field.type):
            yield from fields(field.type, f"{path}{field.name}.")
        else:
            yield f"{path}{field.name}", field, section


def overlay(under: Settings, over: Settings) -> Settings:
    """The settings of both, those of `over` where they disagree."""
    merged = dict(under)
    for key, value in over.items():
        deeper = isinstance(value, dict) and isinstance(under.get(key), dict)
        merged[key] = overlay(under[key], value) if deeper else value
    return merged


def load_file(path: str | Path) -> Settings:
    """The settings of a configuration file, over those of the files that its `base:` names.

    Args:
        path: a YAML file of settings. `base: FILE` (or a list, later over earlier), relative to the file itself, is a
            directive to this function and not a setting.

    Returns:
        The settings, each of its field's type.

    Raises:
        InputError: the file or a base cannot be read, is not YAML, or holds something that is not a setting.
    """
    return _load(Path(path), ())


def _load(path: Path, above: tuple[Path, ...]) -> Settings:
    where = plain_path(path) + (f" (base of {plain_path(above[-1])})" if above else "")
    if any(os.path.realpath(path) == os.path.realpath(file) for file in above):
        raise InputError(f"{where}: the base files form a cycle")
    try:
        tree = read_yaml(path)
        bases = tree.pop("base", [])
        for base in bases if isinstance(bases, list) else [bases]:
            if not isinstance(base, str) or not base.strip() or not base.isprintable():
                raise InputError(f"base {shown(base)} must be the path of a file, or a list of paths")
        settings = typed_settings(tree)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    files = [bases] if isinstance(bases, str) else bases
    below = [_load(path.parent / base, (*above, path)) for base in files]
    return functools.reduce(overlay, [*below, settings], {})


class _Loader(yaml.BaseLoader):
    """YAML with text for every scalar but null, and an error for a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(problem="a key must be text", problem_mark=key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"{shown(key)} is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_NULL = "tag:yaml.org,2002:null"
_Loader.add_implicit_resolver(_NULL, re.compile("^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_constructor(_NULL, lambda loader, node: None)


def read_yaml(path: Path) -> Settings:
    """The mapping in a YAML file, every scalar as text or None; {} for an empty file. Raises InputError."""
    if not str(path).isprintable():
        raise InputError("is not the path of a file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}") from None
    try:
        tree = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = (error.problem_mark or error.context_mark).line + 1
        raise InputError(f"line {line}: {plain(error.problem or error.context)}") from None
    except yaml.YAMLError as error:
        raise InputError(f"is not YAML: {plain(str(error))}") from None
    except RecursionError:
        raise InputError("is nested too deeply") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise InputError(f"must hold keys and values, not {shown(tree)}")
    return tree


def typed_settings(tree: Settings) -> Settings:
    """Settings with every text converted to its field's type.

    Args:
        tree: nested dictionaries of text, lists of text and None, from a file or the command line.

    Raises:
        InputError: an unknown key, a value of another type, a value in place of a section, or the reverse.
    """
    return typed_section(tree, Config, "")


def typed_section(tree: Settings, section: type, path: str) -> Settings:
    """The same for the settings of one dataclass, whose place in the file is `path` (empty, or ending in a dot)."""
    known = {field.name: field.type for field in dataclasses.fields(section)}
    settings = {}
    for key, value in tree.items():
        where = f"{path}{key}"
        if key not in known:
            raise InputError(f"{plain(where)} is not a setting; {_suggestion(where, known)}")
        if dataclasses.is_dataclass(known[key]):
            if not isinstance(value, dict):
                names = ", ".join(field.name for field in dataclasses.fields(known[key]))
                raise InputError(f"{where} {shown(value)} must be a section with keys among {names}")
            settings[key] = typed_section(value, known[key], f"{where}.")
        else:
            settings[key] = _typed(value, known[key], where)
    return settings


def _suggestion(where: str, known: Iterable[str]) -> str:
    everywhere = [key for key, _, _ in fields()]
    if where in everywhere:
        return f"write {where.replace('.', ': {')}: ...{'}' * where.count('.')}"
    similar = similar_names(where, everywhere + sorted({key.rpartition(".")[0] for key in everywhere} - {""}))
    return f"did you mean {' or '.join(map(repr, similar))}?" if similar else f"known here: {', '.join(known)}"


def similar_names(name: str, known: list[str]) -> list[str]:
    """Up to three of the `known` dotted names that an unknown one may stand for: alike in the part after the dots."""
    last = {other: other.rpartition(".")[2] for other in known}
    meant = difflib.get_close_matches(name.rpartition(".")[2], set(last.values()), n=1, cutoff=0.7)
    return difflib.get_close_matches(name, [other for other in known if last[other] in meant], n=3, cutoff=0.0)


@functools.cache
def _converter(hint: Any) -> jsonargparse.ArgumentParser:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    return parser


def _typed(value: Any, hint: Any, where: str) -> Any:
    try:
        items = value
        if get_origin(hint) is tuple and isinstance(value, str):  # from the command line, or a list of one
            items = yaml.load(value, _Loader) if value.startswith("[") else [value]
        converted = _converter(hint).parse_object({"value": items}).value
        right = fits(converted, hint)
    except Exception:  # not only ArgumentError: the YAML parser behind it fails in many ways on odd text
        right = False
    if not right:
        raise InputError(f"{where} {shown(value)} must be {expected(hint)}")
    return converted


def from_settings(settings: Settings, section: type = Config) -> Any:
    """The (unresolved) `Config` that holds typed settings, with defaults elsewhere."""
    types_of = {field.name: field.type for field in dataclasses.fields(section)}
    return section(
        **{
            key: from_settings(value, types_of[key]) if dataclasses.is_dataclass(types_of[key]) else value
            for key, value in settings.items()
        }
    )


def to_dict(config: Config) -> Settings:
    """The configuration as nested dictionaries of what JSON and YAML know: tuples become lists."""
    return dataclasses.asdict(config, dict_factory=_plain)


def _plain(items: list[tuple[str, Any]]) -> Settings:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in items}


def dump_config(config: Config) -> str:
    """The configuration as YAML text; `load_file` and `from_settings` give back an equal one."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def difference(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """The dotted keys in which two configurations differ, each with its old and its new value."""
    both = ((key, _get(old, key), _get(new, key)) for key, _, _ in fields())
    return [(key, before, after) for key, before, after in both if before != after]


def _get(config: Config, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)


def resumed(recorded: Config, requested: Config) -> Config:
    """The configuration with which a run continues in its own directory.

    Args:
        recorded: what the run started with, from its config.yaml.
        requested: what is asked for now, resolved.

    Returns:
        `requested`, with what was settled at the start (vocabulary size, dtypes) taken from `recorded`.

    Raises:
        InputError: they differ in a key that is not in `RESUMABLE`.
    """
    refused = []
    for key, old, new in difference(recorded, requested):
        if key in SETTLED and new == SETTLED[key]:
            requested = _replaced(requested, key, old)
        elif key not in RESUMABLE:
            refused.append(f"{key} (was {shown(old)}, now {shown(new)})")
    if refused:
        more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
        raise InputError(
            f"{requested.run_dir} holds a run with another configuration: {', '.join(refused[:3])}{more}"
            "; use another run_dir or the recorded values"
        )
    return requested


def require_same(first: Settings, config: Config) -> None:
    """Checks that this process has the settings of process 0.

    Args:
        first: what `to_dict` gives for the configuration of process 0.
        config: this process's.

    Raises:
        InputError: they differ in a key that is not in `LOCAL`.
    """
    for key, theirs, mine in difference(from_settings(first), from_settings(to_dict(config))):
        if key not in LOCAL:
            values = f"{shown(mine)} here, but {shown(theirs)} in process 0"
            raise InputError(f"{key} is {values}; give all the same command")


def _replaced(config: Any, key: str, value: Any) -> Any:
    name, _, rest = key.partition(".")
    return dataclasses.replace(config, **{name: _replaced(getattr(config, name), rest, value) if rest else value})
