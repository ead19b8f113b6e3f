"""Text from a trained model."""

from ddl_jax.inference.generation import generate, next_tokens, stream
from ddl_jax.inference.sampling import Sampling
from ddl_jax.inference.skipping import skipping

__all__ = ["Sampling", "generate", "next_tokens", "skipping", "stream"]
