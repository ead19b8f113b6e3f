"""The gate β (B, T) between 0 and 2: how far an edit goes. 0 skips, 1 overwrites, 2 reflects."""

import math

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jaxtyping import Array, Float

from ddl_jax.config import GateConfig
from ddl_jax.linear import project
from ddl_jax.parameters import bias, normal
from ddl_jax.precision import at_least_float32
from ddl_jax.remat import PRODUCT


class Gate(nnx.Module):
    """β = 2·sigmoid(logit), logit = W c + b, or W₂ tanh(W₁ c + b₁) + b₂; all in float32 (paper eq. 2.5)."""

    def __init__(self, config: GateConfig, width: int, rngs: nnx.Rngs):
        std = 0.5 / width**0.5
        self.hidden = normal(rngs, (width, config.hidden), std) if config.hidden else None
        self.hidden_bias = bias(jnp.zeros(config.hidden)) if config.hidden_bias else None
        self.output = normal(rngs, (config.hidden or width,), std)
        share = min(max(config.initial / 2, 1e-6), 1 - 1e-6)
        self.bias = bias(jnp.asarray(math.log(share / (1 - share))))

    def __call__(self, context: Float[Array, "batch tokens width"]) -> Float[Array, "batch tokens"]:
        c = at_least_float32(context)
        if self.hidden is not None:
            c = checkpoint_name(project(c, self.hidden, "highest"), PRODUCT)
            c = jnp.tanh(c if self.hidden_bias is None else c + self.hidden_bias[...])
        return self.of(checkpoint_name(project(c, self.output, "highest"), PRODUCT))

    def of(self, product: Float[Array, "batch tokens"]) -> Float[Array, "batch tokens"]:
        """β from the logit without its bias."""
        return 2 * jax.nn.sigmoid(product + self.bias[...])
