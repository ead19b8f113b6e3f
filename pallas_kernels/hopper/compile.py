"""Compiles functions for H200s on a machine without a GPU, and keeps what each kernel takes."""

from collections.abc import Callable, Iterator
import contextlib
import re
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Compiled, Lowered, Traced

from pallas_kernels.hopper.ptx import Resources, recorded
from pallas_kernels.hopper.target import MissingExtra, mesh

_HASH = re.compile(r'kernel_hash = "((?:[^"\\]|\\.)*)"')
_NEEDED = {"ptxas": "ptxas", "cuDNN": "cuDNN"}  # by what their absence is complained of with
# By the hash that jax gives a kernel: a kernel that this process compiled before comes from jax's cache, without PTX.
_known: dict[str, Resources] = {}


def compile_for(function: Callable, *arguments: Any) -> Compiled:
    """Compiles a function for the H200s that its arguments are placed on; nothing runs, no GPU is needed.

    Args:
        function: of `arguments`.
        arguments: trees of `jax.ShapeDtypeStruct`s, with shardings over a `mesh`; if none has one, all are put on one
            H200.

    Raises:
        MissingExtra: the CUDA plugin of jax, or ptxas, is not installed.
    """
    return compile_traced(trace(function, *arguments))


def trace(function: Callable, *arguments: Any) -> Traced:
    """The first step of `compile_for`: knows the function's `jaxpr`.

    Args:
        function: of `arguments`.
        arguments: as of `compile_for`.

    Raises:
        MissingExtra: the CUDA plugin of jax, or a library that the function calls, is not installed.
    """
    leaves, tree = jax.tree.flatten(arguments)
    if all(leaf.sharding is None for leaf in leaves):
        alone = NamedSharding(mesh({"device": 1}), PartitionSpec())
        arguments = tree.unflatten(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=alone) for leaf in leaves)
    jitted = function if hasattr(function, "trace") else jax.jit(function)
    with _missing_extras():
        return jitted.trace(*arguments)


def compile_traced(traced: Traced) -> Compiled:
    """The rest of `compile_for`.

    Raises:
        MissingExtra: as `compile_for`.
    """
    with _missing_extras():
        return compile_lowered(traced.lower(lowering_platforms=("cuda",)))


def resources(function: Callable, *arguments: Any) -> Resources:
    """Compiles a function with one Mosaic GPU kernel for an H200, and says what the kernel takes.

    Args:
        function: of `arguments`.
        arguments: as of `compile_for`.

    Raises:
        MissingExtra: the CUDA plugin of jax, or ptxas, is not installed.
        ValueError: the function has no Mosaic GPU kernel, or several.
        RuntimeError: jax took the kernel from a cache, and nobody has seen its PTX.
    """
    lowered = trace(function, *arguments).lower(lowering_platforms=("cuda",))
    kernels = _kernels(lowered)
    if len(kernels) != 1:
        raise ValueError(f"resources() is for a function with one Mosaic GPU kernel; this one has {len(kernels)}")
    (kernel,) = kernels
    if kernel not in _known:
        compile_lowered(lowered)
    if kernel not in _known:
        raise RuntimeError(
            "jax took the kernel from a cache, so there is no PTX to read: ask for its resources before this process "
            "compiles it by other means than compile_for, and without jax_compilation_cache_dir"
        )
    return _known[kernel]


def compile_lowered(lowered: Lowered) -> Compiled:
    """The last step of `compile_for`."""
    kernels = _kernels(lowered)
    with _missing_extras():
        if not kernels:
            return lowered.compile()
        with recorded() as found:
            compiled = lowered.compile()
    if len(kernels) == len(found) == 1:  # of several, nothing says which is which
        _known[kernels.pop()] = found[0]
    return compiled


def _kernels(lowered: Lowered) -> set[str]:
    return set(_HASH.findall(lowered.as_text()))


@contextlib.contextmanager
def _missing_extras() -> Iterator[None]:
    """Says in one line what to install, where jax or XLA miss something."""
    try:
        yield
    except RuntimeError as error:  # jax's own errors are such, too
        text = str(error)
        missing = next((name for mark, name in _NEEDED.items() if mark in text), None)
        if missing is None:
            raise
        raise MissingExtra(
            f"compiling for an H200 needs {missing}, and found none: pip install -e '.[compile]'"
        ) from error
