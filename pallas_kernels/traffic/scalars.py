"""Integer and boolean arithmetic of a kernel in NumPy, for all programs of the grid at once.

A value is an array with one entry per program, or a single number that all programs share; None where it is unknown.
Integers wrap around and divide as on the GPU: towards zero.
"""

from typing import Any

import numpy as np


def _divide(a, b):
    b = np.where(b == 0, 1, b)
    quotient = np.abs(a) // np.abs(b)
    return np.where((a < 0) != (b < 0), -quotient, quotient)


def _select(which, *cases):
    which, *cases = np.broadcast_arrays(which, *cases)
    return np.choose(np.asarray(which, np.intp), cases)


def _shift_right_logical(a, b):
    unsigned = np.asarray(a).view(f"u{np.asarray(a).dtype.itemsize}")
    return np.right_shift(unsigned, np.asarray(b, unsigned.dtype))


_RULES = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _divide,
    "rem": lambda a, b: np.fmod(a, np.where(b == 0, 1, b)),
    "neg": np.negative,
    "sign": np.sign,
    "abs": np.abs,
    "max": np.maximum,
    "min": np.minimum,
    "clamp": lambda low, a, high: np.minimum(np.maximum(a, low), high),
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "shift_left": np.left_shift,
    "shift_right_arithmetic": np.right_shift,
    "shift_right_logical": _shift_right_logical,
    "square": np.square,
    "select_n": _select,
}
_UNCHANGED = frozenset({
    "convert_element_type", "copy", "stop_gradient", "multiple_of", "squeeze", "reshape", "broadcast_in_dim",
    "reduce_precision", "pvary",
})  # fmt: skip


def is_index(aval: Any) -> bool:
    """Whether values of this type have their real values: scalar integers and booleans."""
    return getattr(aval, "shape", None) == () and getattr(aval.dtype, "kind", "") in ("i", "u", "b")


def evaluate(equation: Any, inputs: list[np.ndarray | None]) -> np.ndarray | None:
    """The value of an equation's only output; None if it is no scalar integer, or not known."""
    name, aval = equation.primitive.name, equation.outvars[0].aval
    if not is_index(aval) or any(value is None for value in inputs):
        return None
    if name == "integer_pow":
        return np.asarray(np.power(inputs[0], equation.params["y"])).astype(aval.dtype)
    if name in _UNCHANGED and len(inputs) == 1:
        return np.asarray(inputs[0]).astype(aval.dtype)
    return np.asarray(_RULES[name](*inputs)).astype(aval.dtype) if name in _RULES else None
