"""From the embedding (B, T, d) to the first residual state (B, T, V, d)."""

from flax import nnx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ddl_jax.config import ResidualConfig
from ddl_jax.parameters import weight
from ddl_jax.residual.channels import spread


def delayed(x: Float[Array, "batch tokens *rest"], steps: int) -> Float[Array, "batch tokens *rest"]:
    """x moved `steps` tokens into the future, zeros coming in: the result at t is x at t − steps."""
    if steps == 0:
        return x
    padding = [(0, 0), (steps, 0)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, padding)[:, : x.shape[1]]


class RepeatExpansion(nnx.Module):
    """No EC: every channel starts as the embedding."""

    def __init__(self, config: ResidualConfig, width: int, rngs: nnx.Rngs):
        self.channels = config.value_channels

    def __call__(self, embedding: Float[Array, "batch tokens width"]) -> Float[Array, "batch tokens channels width"]:
        batch, tokens, width = embedding.shape
        return jnp.broadcast_to(embedding[:, :, None], (batch, tokens, self.channels, width))


class ConvolutionExpansion(nnx.Module):
    """EC: a depthwise causal convolution over K tokens, X_ji[t] = Σ_s a_sji e_i[t−s], that starts as the repetition."""

    def __init__(self, config: ResidualConfig, width: int, rngs: nnx.Rngs):
        identity = jnp.zeros((config.expansion_taps, config.value_channels, width)).at[0].set(1.0)
        self.taps = weight(identity)

    def __call__(self, embedding: Float[Array, "batch tokens width"]) -> Float[Array, "batch tokens channels width"]:
        return sum(spread(delayed(embedding, steps), tap) for steps, tap in enumerate(self.taps[...]))


EXPANSIONS = {"repeat": RepeatExpansion, "convolution": ConvolutionExpansion}
