"""Compiling fast, for functions that run a few times on a few numbers."""

from collections.abc import Iterator
import contextlib

import jax

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@contextlib.contextmanager
def quick_compilation() -> Iterator[None]:
    """All that is compiled inside is compiled fast. (None of it is used outside: the setting is part of jax's keys.)"""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
