"""The SwiGLU multilayer perceptron."""

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jaxtyping import Array, Float

from ddl_jax.cache import Cache
from ddl_jax.config import TransformerConfig
from ddl_jax.config.transformer import hidden_width
from ddl_jax.linear import project
from ddl_jax.parameters import normal
from ddl_jax.remat import PRODUCT


class Mlp(nnx.Module):
    """W₃ (silu(W₁ c) ⊙ W₂ c), without biases."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        d, hidden = config.width, hidden_width(config.width)
        self.input = normal(rngs, (d, 2, hidden), 0.5 / d**0.5, axes=("width", None, "hidden"))
        std = 0.5 / d**0.5 / config.layers**0.5
        self.output = normal(rngs, (hidden, d), std, axes=("hidden", "width"))

    def hidden(self, context: Float[Array, "batch tokens width"]) -> Float[Array, "batch tokens 2 hidden"]:
        """W₁ c and W₂ c: what backward cannot do without."""
        return checkpoint_name(project(context, self.input), PRODUCT)

    def branch(self, hidden: Float[Array, "batch tokens 2 hidden"]) -> Float[Array, "batch tokens width"]:
        """The sublayer's output, h."""
        gate, linear = jnp.unstack(hidden, axis=-2)
        return project(jax.nn.silu(gate) * linear, self.output)

    def __call__(self, context: Float[Array, "batch tokens width"], cache: Cache | None = None):
        return self.branch(self.hidden(context))

    def remember(self, context: Float[Array, "batch tokens width"], cache: Cache):
        """Keeps what later tokens need of these: nothing. Gives what `recall` takes."""
        return context

    def recall(self, context: Float[Array, "batch tokens width"], cache: Cache):
        """The sublayer's output, h, for tokens remembered before."""
        return self(context)
