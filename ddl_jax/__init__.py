"""Deep Delta Learning in JAX: Transformers whose residual stream is edited rather than added to."""

import importlib

_HOMES = {
    "Config": "config",
    "GateConfig": "config",
    "ResidualConfig": "config",
    "TransformerConfig": "config",
    "ValueConfig": "config",
    "DeltaStream": "residual",
    "Transformer": "transformer",
    "load_run": "run",
}
__all__ = [*_HOMES]


def __getattr__(name: str):
    # Imported when asked for: a mistake on the command line is reported before jax is loaded.
    if name in _HOMES:
        return getattr(importlib.import_module(f"ddl_jax.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'ddl_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
