"""The Transformer around the residual stream. Knows the stream's interface, not its kinds."""

from ddl_jax.transformer.model import Transformer

__all__ = ["Transformer"]
