"""How good a model is."""

import importlib

from ddl_jax.evaluation.validation import Validation, padded_byte_lengths, validate

_HOMES = {"HarnessModel": "harness", "validate_run": "held_out_text"}
__all__ = ["Validation", "padded_byte_lengths", "validate", *_HOMES]


def __getattr__(name: str):
    # Imported when asked for: they need what training is made of, which itself needs this; and lm_eval.
    if name in _HOMES:
        return getattr(importlib.import_module(f"ddl_jax.evaluation.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'ddl_jax.evaluation' has no attribute {name!r}")
