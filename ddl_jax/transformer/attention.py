"""Causal multi-head attention: RoPE, then RMSNorm on queries and keys; a norm and a gate of what heads give."""

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ddl_jax.cache import Cache, attend
from ddl_jax.config import TransformerConfig
from ddl_jax.linear import project
from ddl_jax.parameters import normal
from ddl_jax.partition import entering
from ddl_jax.precision import at_least_float32
from ddl_jax.remat import PRODUCT
from ddl_jax.transformer.norm import RMSNorm

ROPE_BASE = 10000.0  # the paper's and the official code's


def rope_angles(
    positions: Int[Array, "*rows tokens"], head_dim: int, dtype: jnp.dtype = jnp.float32
) -> Float[Array, "*rows tokens half"]:
    """Position times frequency, in the given dtype: t · base^(−2i/D) for i < D/2."""
    frequencies = ROPE_BASE ** (-jnp.arange(0, head_dim, 2, dtype=dtype) / head_dim)
    return positions.astype(dtype)[..., None] * frequencies


def rotate(x: Float[Array, "batch tokens heads dim"], angles: Float[Array, "*rows tokens half"]):
    """RoPE on halves: (x₁, x₂) → (x₁ cos − x₂ sin, x₂ cos + x₁ sin), in float32 or wider."""
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    first, second = jnp.split(at_least_float32(x), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(nnx.Module):
    """softmax(q kᵀ / √D) v under a causal mask, without biases.

    `head_norm` and `output_gate` are the official code's `using_groupnorm` and `use_output_gate`.
    """

    def __init__(self, config: TransformerConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        d, H, D = config.width, config.heads, config.head_dim
        self.implementation = None if config.attention == "auto" else config.attention  # jax's own choice
        self.qkv = normal(rngs, (d, 3, H, D), 0.5 / d**0.5, axes=("width", None, "heads", None))
        std = 0.5 / d**0.5 / config.layers**0.5
        self.output = normal(rngs, (H, D, d), std, axes=("heads", None, "width"))
        self.query_norm = RMSNorm(D, dtype) if config.qk_norm else None
        self.key_norm = RMSNorm(D, dtype) if config.qk_norm else None
        self.head_norm = RMSNorm(D, dtype) if config.head_norm or config.output_gate else None
        self.gate = normal(rngs, (d, H, D), 0.5 / d**0.5, axes=("width", "heads", None)) if config.output_gate else None

    def hidden(
        self, context: Float[Array, "batch tokens width"], cache: Cache | None = None
    ) -> Float[Array, "batch tokens heads dim"]:
        """What each head gives: what backward cannot do without."""
        query, key, value = self._query_key_value(context, cache)
        mixed = attend(query, key, value, cache, self.implementation)
        # What cuDNN gives is kept without a name (`ddl_jax.remat`), and named it would be kept twice.
        mixed = mixed if self.implementation == "cudnn" else checkpoint_name(mixed, PRODUCT)
        return self._finished(mixed, context)

    def _query_key_value(self, context, cache):
        query, key, value = jnp.unstack(checkpoint_name(project(context, self.qkv), PRODUCT), axis=-3)
        positions = jnp.arange(query.shape[1]) if cache is None else cache.now.positions
        angles = rope_angles(positions, query.shape[-1], at_least_float32(query).dtype)
        query, key = rotate(query, angles), rotate(key, angles)
        if self.query_norm is not None:
            # One gain for all heads, of which a device may have some.
            query_norm, key_norm = jax.tree.map(entering, (self.query_norm, self.key_norm))
            query, key = query_norm(query), key_norm(key)
        return query.astype(value.dtype), key.astype(value.dtype), value

    def _finished(self, mixed, context):
        """What each head gives from what it has mixed: norm(y) ⊙ silu(W_g c), as far as configured."""
        if self.head_norm is not None:
            mixed = jax.tree.map(entering, self.head_norm)(mixed)
        if self.gate is not None:
            mixed = mixed * jax.nn.silu(checkpoint_name(project(context, self.gate), PRODUCT))
        return mixed

    def branch(self, hidden: Float[Array, "batch tokens heads dim"]) -> Float[Array, "batch tokens width"]:
        """The sublayer's output, h."""
        return project(hidden, self.output, inputs=2)

    def __call__(self, context: Float[Array, "batch tokens width"], cache: Cache | None = None):
        return self.branch(self.hidden(context, cache))

    def remember(self, context: Float[Array, "batch 1 width"], cache: Cache):
        """Keeps what later tokens need of this one, its key and value. Gives what `recall` takes, with its query."""
        query, key, value = self._query_key_value(context, cache)
        cache.remember(key, value)
        return query, context

    def recall(self, remembered, cache: Cache) -> Float[Array, "batch 1 width"]:
        """The sublayer's output, h, for a token remembered before."""
        query, context = remembered
        return self.branch(self._finished(cache.recall(query), context))
