"""The SwiGLU multilayer perceptron."""

from flax import nnx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ddl_jax.config import TransformerConfig
from ddl_jax.linear import project
from ddl_jax.parameters import normal


def hidden_width(width: int) -> int:
    """floor(8d / 3): three matrices then cost what two of hidden width 4d would."""
    return 8 * width // 3


class Mlp(nnx.Module):
    """W₃ (silu(W₁ c) ⊙ W₂ c), without biases."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        d, hidden = config.width, hidden_width(config.width)
        self.input = normal(rngs, (d, 2, hidden), 0.5 / d**0.5)
        self.output = normal(rngs, (hidden, d), 0.5 / d**0.5 / config.layers**0.5)

    def __call__(self, context: Float[Array, "batch tokens width"]) -> Float[Array, "batch tokens width"]:
        gate, linear = jnp.unstack(project(context, self.input[...]), axis=-2)
        return project(jax.nn.silu(gate) * linear, self.output[...])
