"""Compiling fast: these tests train tiny models many times over, and most of that is compilation."""

import os

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # for processes that a test starts
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    del os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"]
