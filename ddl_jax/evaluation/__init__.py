"""How good a model is."""

from ddl_jax.evaluation.validation import Validation, validate

__all__ = ["Validation", "validate"]
