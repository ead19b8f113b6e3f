"""Buffers and barriers of a kernel, and how many bytes a view of one has."""

import dataclasses
import math
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu
import numpy as np

UNKNOWN = None  # in place of the value of an array or a floating-point scalar


@dataclasses.dataclass(eq=False)
class Ref:
    """A buffer in global or shared memory, or a group of barriers."""

    name: str
    aval: Any
    loaded: int = 0
    stored: int = 0

    @property
    def is_global(self) -> bool:
        return is_global(self.aval)


def is_ref(aval) -> bool:
    """Whether a type is that of a buffer."""
    return hasattr(aval, "inner_aval")


def is_global(aval) -> bool:
    """Whether a buffer's type is one of global memory: every memory that is not known to be on the chip."""
    return aval.memory_space not in (plgpu.SMEM, plgpu.TMEM, plgpu.REGS)


def aval_bytes(aval) -> int:
    """Bytes of an array."""
    return math.prod(aval.shape) * aval.dtype.itemsize


def view_bytes(ref: Ref, tree, leaves: list, avals: list):
    """Bytes of a view of a buffer, one number or one per program. What lies outside the buffer is not moved: TMA
    neither reads nor writes there."""
    aval = ref.aval
    for transform in tree.unflatten(avals):
        aval = transform.transform_type(aval)
    if not all(isinstance(size, int) for size in aval.shape):
        raise NotImplementedError(f"a copy of {aval.shape}, whose size depends on data")
    whole = aval_bytes(aval)
    transforms = tree.unflatten(leaves)
    if not all(hasattr(transform, "indices") for transform in transforms):
        return whole
    axes = [[0, size, size] for size in ref.aval.shape]  # first element, elements asked for, elements there are
    picked = []  # axes indexed by one number
    for transform in transforms:
        kept = []
        for index, axis in zip(transform.indices, axes, strict=True):
            is_slice = hasattr(index, "size") and hasattr(index, "stride")
            start = index.start if is_slice else index
            if start is UNKNOWN or (is_slice and index.stride != 1) or isinstance(start, Ref):
                return whole
            moved = [axis[0] + np.asarray(start, np.int64), index.size if is_slice else 1, axis[2]]
            (kept if is_slice else picked).append(moved)
        axes = kept
    elements = np.int64(1)
    for start, asked, there in axes + picked:
        elements = elements * np.clip(there - start, 0, asked)
    return elements * ref.aval.dtype.itemsize
