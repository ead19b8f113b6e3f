import importlib.util

import pytest


@pytest.fixture(scope="session")
def room_alone() -> str:
    """The beginning of a program that uses `ddl_jax.data` without what `ddl_jax` itself imports, such as JAX."""
    folders = list(importlib.util.find_spec("ddl_jax").submodule_search_locations)
    return f"import sys, types; package = types.ModuleType('ddl_jax'); package.__path__ = {folders}\n" + (
        "sys.modules['ddl_jax'] = package\n"
    )
