"""The kernels and the shapes at which they are compiled, counted, tested and compared."""

from collections.abc import Callable, Iterator
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

F32 = jnp.float32


@dataclasses.dataclass(frozen=True)
class Shape:
    """A state X (tokens, V, d), and for the token read its taps K and the length of a sequence."""

    tokens: int
    channels: int
    width: int
    dtype: str = "bfloat16"
    taps: int = 4
    sequence: int = 1024


# 32 sequences of 1024 tokens: a GPU's part of a training step. The odd ones are ragged in every way there is.
SHAPES = {
    "small": Shape(32_768, 4, 768),
    "small_v1": Shape(32_768, 1, 768),
    "small_v2": Shape(32_768, 2, 768),
    "small_v8": Shape(32_768, 8, 768),
    "medium": Shape(32_768, 4, 1024),
    "medium_v1": Shape(32_768, 1, 1024),
    "medium_v2": Shape(32_768, 2, 1024),
    "medium_v8": Shape(32_768, 8, 1024),
    "small_float32": Shape(32_768, 4, 768, "float32"),
    "wide": Shape(32_768, 8, 2048, taps=8),
    "narrow": Shape(32_768, 4, 128),
    "odd_384": Shape(8191, 3, 384, sequence=8191),
    "odd_640": Shape(63, 5, 640, "float32", taps=3, sequence=63),
    "one_token": Shape(1, 4, 768, sequence=1),
}


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
    return [case for name, shape in SHAPES.items() for case in (*_rewrites(name, shape), *_token_reads(name, shape))]


def _rewrites(name: str, shape: Shape) -> Iterator[Case]:
    from pallas_kernels.rewrite import mosaic_gpu, shapes

    N, V, d, dtype = shape.tokens, shape.channels, shape.width, shape.dtype
    X, h, v, β, a = _structs(((N, V, d), dtype), ((N, d), dtype), ((N, V), F32), ((N,), F32), ((V, d), F32))
    forward = functools.partial(mosaic_gpu.forward, epsilon=1e-5, erase=True)
    backward = functools.partial(mosaic_gpu.backward, epsilon=1e-5, erase=True)

    def least(**flags):
        return shapes.minimum_bytes(N, V, d, dtype, dtype, **flags)

    yield Case("rewrite", name, forward, (X, h, v, β), least(reads=False))
    yield Case("rewrite_and_read", name, forward, (X, h, v, β, a), least(reads=True))
    yield Case(
        "rewrite_backward",
        name,
        lambda X, h, v, β, d_new: backward(X, h, v, β, None, d_new, None),
        (X, h, v, β, X),
        least(reads=False, backward=True),
    )
    yield Case("rewrite_and_read_backward", name, backward, (X, h, v, β, a, X, h), least(reads=True, backward=True))
    yield Case(
        "rewrite_and_read_reverse",
        name,
        functools.partial(backward, reverse=True),
        (X, h, v, β, a, X, h),
        least(reads=True, backward=True, reverse=True),
    )


def _token_reads(name: str, shape: Shape) -> Iterator[Case]:
    from pallas_kernels.token_read import mosaic_gpu, shapes

    N, V, d, K, T = shape.tokens, shape.channels, shape.width, shape.taps, shape.sequence
    X, a, dx = _structs(((N // T, T, V, d), shape.dtype), ((K, V, d), F32), ((N // T, T, d), shape.dtype))

    def least(backward):
        return shapes.minimum_bytes(N, V, d, K, shape.dtype, backward=backward)

    yield Case("token_read", name, mosaic_gpu.token_read, (X, a), least(False))
    yield Case("token_read_backward", name, mosaic_gpu.token_read_backward, (X, a, dx), least(True))


def _structs(*shapes_and_dtypes):
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes_and_dtypes)
