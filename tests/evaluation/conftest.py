"""Settings for these tests: programs run a few times on a few numbers."""

import jax
import pytest


@pytest.fixture(scope="package", autouse=True)
def compile_fast():
    """Most of the time would be compilation."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
