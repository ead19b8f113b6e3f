"""Text from a trained model."""

from ddl_jax.inference.generate import generate, next_tokens, stream
from ddl_jax.inference.sampling import Sampling

__all__ = ["Sampling", "generate", "next_tokens", "stream"]
