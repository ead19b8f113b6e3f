"""The kernels and shapes that `pallas_kernels.hopper` compiles and counts."""

from collections.abc import Callable
import dataclasses
import math

import jax


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel at one shape.

    Attributes:
        kernel: the operation's name, such as `rewrite_and_read_backward`.
        shape: the shape's name, such as `small`.
        function: of `arguments`; runs exactly one Mosaic GPU kernel.
        arguments: the first is the state, (tokens…, channels, width).
        minimum_bytes: the bytes that must move between memory and chip, from the operation's formula.
    """

    kernel: str
    shape: str
    function: Callable
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    minimum_bytes: int

    @property
    def tokens(self) -> int:
        """How many tokens the state holds."""
        return math.prod(self.arguments[0].shape[:-2])


def cases(kernel: str | None = None, shape: str | None = None) -> list[Case]:
    """Every case, or those of one kernel, one shape, or both; an empty list if there is none."""
    return [case for case in _all() if kernel in (None, case.kernel) and shape in (None, case.shape)]


def _all() -> list[Case]:
    return []
