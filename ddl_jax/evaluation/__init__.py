"""How good a model is."""

from ddl_jax.evaluation.validation import Validation, padded_byte_lengths, validate

__all__ = ["Validation", "padded_byte_lengths", "validate"]
