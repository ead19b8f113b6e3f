"""The vocabulary in which `config` states its rules: each broken rule is one InputError of one line."""

import dataclasses
import math
import os
import types
from typing import Any, Literal, Union, get_args, get_origin

from ddl_jax.errors import InputError

LARGEST_INT = 2**31 - 1  # array dimensions and step counters are 32-bit
LARGEST_FLOAT = 3.4028234663852886e38  # float32's largest number


def shown(value: Any) -> str:
    """`value` as it stands in a message: one short printable line, spelled as in YAML; text in quotes."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > 128:  # Python refuses to print very long integers
        return hex(value)[:20] + "..."
    return plain(repr(value) if isinstance(value, str) else str(list(value) if isinstance(value, tuple) else value))


def plain(text: str) -> str:
    """`text` on one short printable line."""
    text = " ".join(text.split())
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= 80 else text[:77] + "..."


def plain_path(path: os.PathLike | str) -> str:
    """A path on one short printable line: of a long one the end, which says more than the beginning."""
    text = " ".join(str(path).split())
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= 80 else f"...{text[-77:]}"


def require(config: Any, path: str, name: str, holds: bool, rule: str, legal: str = "") -> None:
    """Unless `holds`, raises InputError "path.name value rule; legal" about the named field of `config`."""
    if not holds:
        where = f"{path}.{name}".removeprefix(".")
        raise InputError(f"{where} {shown(getattr(config, name))} {rule}" + (f"; {legal}" if legal else ""))


def require_least(config: Any, path: str, least: int, *names: str) -> None:
    """The named integers, where given, lie in [least, LARGEST_INT]."""
    for name in names:
        value = getattr(config, name)
        if value is not None:
            require(config, path, name, value >= least, f"must be at least {least}", f"nearest: {least}")
            require(config, path, name, value <= LARGEST_INT, "is too large", f"nearest: {LARGEST_INT}")


def require_between(config: Any, path: str, name: str, low: float, high: float, why: str = "") -> None:
    """The named number lies in [low, high]."""
    value = getattr(config, name)
    rule, nearest = f"must lie in [{low}, {high}]{why}", f"nearest: {min(max(value, low), high)}"
    require(config, path, name, low <= value <= high, rule, nearest)


def require_unset(config: Any, path: str, names: tuple[str, ...], because: str) -> None:
    """The named fields, which would have no effect, are None."""
    for name in names:
        require(config, path, name, getattr(config, name) is None, f"does not apply: {because}", "remove it")


def require_types(config: Any, path: str) -> None:
    """Every field of the dataclass holds what its annotation says, numbers being finite and text printable."""
    for field in dataclasses.fields(config):
        right = fits(getattr(config, field.name), field.type)
        require(config, path, field.name, right, f"must be {expected(field.type)}")


def fits(value: Any, hint: Any) -> bool:
    """Whether `value` is what the annotation `hint` of a configuration's field allows. True is not an integer here."""
    origin, options = get_origin(hint), get_args(hint)
    if origin is Literal:
        return isinstance(value, str) and value in options
    if origin in (Union, types.UnionType):
        return any(fits(value, option) for option in options)
    if origin is tuple:
        if options[-1] is Ellipsis:
            return isinstance(value, tuple) and all(fits(item, options[0]) for item in value)
        return isinstance(value, tuple) and len(value) == len(options) and all(map(fits, value, options))
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and _in_float32(value)
    return isinstance(value, hint) and (hint is not str or value.isprintable())


def _in_float32(value: float) -> bool:
    return abs(value) <= LARGEST_FLOAT and math.isfinite(value)  # the comparison first: isfinite(10**400) overflows


def expected(hint: Any) -> str:
    """The annotation `hint` in words: "an integer or null", "one of none, mup"."""
    origin, options = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(options)}"
    if origin in (Union, types.UnionType):
        return " or ".join(map(expected, options)).replace(" or false or ", ", false or ")
    if origin is tuple:
        items = {int: "integers", float: "numbers"}.get(options[0], "texts")
        return f"a list of {items}" if options[-1] is Ellipsis else f"a list of {len(options)} numbers"
    words = {int: "an integer", float: "a finite number", bool: "true or false", str: "printable text"}
    return words.get(hint, "null" if hint is types.NoneType else f"a section ({getattr(hint, '__name__', hint)})")


def filled(config: Any, **defaults: Any) -> Any:
    """`config` with each of its None fields replaced by the given default."""
    return dataclasses.replace(config, **{n: v for n, v in defaults.items() if getattr(config, n) is None})
