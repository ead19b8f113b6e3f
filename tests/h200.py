"""What tests that compile for H200s ask for."""

import importlib.util

import pytest

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None,
    reason="needs the extra compile: pip install -e '.[compile]'",
)
