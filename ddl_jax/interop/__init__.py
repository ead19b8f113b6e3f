"""Weights of the official PyTorch models, in and out."""

import importlib

_HOMES = {"VARIANTS": "options", "from_official": "weights", "to_official": "weights"}
__all__ = [*_HOMES]


def __getattr__(name: str):
    # Imported when asked for: a mistake on the command line is reported before jax is loaded.
    if name in _HOMES:
        return getattr(importlib.import_module(f"ddl_jax.interop.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'ddl_jax.interop' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
