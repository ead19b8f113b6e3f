"""A block: one attention and one MLP sublayer, each with its norm. How they are joined is the stream's affair."""

from flax import nnx
import jax.numpy as jnp

from ddl_jax.config import TransformerConfig
from ddl_jax.transformer.attention import Attention
from ddl_jax.transformer.mlp import Mlp
from ddl_jax.transformer.norm import RMSNorm

SUBLAYERS = 2  # attention, MLP


class Block(nnx.Module):
    def __init__(self, config: TransformerConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.width, dtype)
        self.attention = Attention(config, dtype, rngs)
        self.mlp_norm = RMSNorm(config.width, dtype)
        self.mlp = Mlp(config, rngs)

    def sublayers(self):
        """(norm, sublayer) in the order in which they write into the stream."""
        return (self.attention_norm, self.attention), (self.mlp_norm, self.mlp)
