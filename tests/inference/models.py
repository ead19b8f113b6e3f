"""Small models with generic parameters."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from ddl_jax.config import TransformerConfig
from ddl_jax.transformer import Transformer

VOCABULARY = 40


def make_model(residual, **settings):
    """A model with generic parameters: from those it starts with, little comes through the gates and convolutions."""
    settings = {"layers": 2, "width": 16, "heads": 2, "context_length": 12, "vocab_size": VOCABULARY} | settings
    config = TransformerConfig(residual=residual, **settings)
    graph, parameters = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)

    def draw(leaf):
        return jnp.asarray(0.1 + 0.4 * rng.standard_normal(leaf.shape), jnp.float32)

    return nnx.merge(graph, jax.tree.map(draw, parameters))
