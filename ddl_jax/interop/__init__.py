"""Weights of the official PyTorch models, in and out."""

from ddl_jax.interop.options import VARIANTS
from ddl_jax.interop.weights import from_official, to_official

__all__ = ["VARIANTS", "from_official", "to_official"]
