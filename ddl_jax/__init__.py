"""Deep Delta Learning in JAX: Transformers whose residual stream is edited rather than added to."""

from ddl_jax.config import Config, GateConfig, ResidualConfig, TransformerConfig, ValueConfig
from ddl_jax.residual import DeltaStream
from ddl_jax.transformer import Transformer

__all__ = ["Config", "DeltaStream", "GateConfig", "ResidualConfig", "Transformer", "TransformerConfig", "ValueConfig"]
