"""Cross-entropy in chunks of tokens: the logits (tokens, vocabulary) never exist at once."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ddl_jax.data import NO_TARGET
from ddl_jax.precision import at_least_float32
from ddl_jax.transformer.model import head

CHUNK = 1024  # tokens; at the paper's vocabulary a chunk's float32 logits take 206 MB


@jax.custom_vjp
def cross_entropy(
    features: Float[Array, "*sequences tokens width"],
    weight: Float[Array, "vocab width"],
    targets: Int[Array, "*sequences tokens"],
) -> Float[Array, ""]:
    """Sum over tokens of −log softmax(features · weightᵀ)[target], in nats; targets of −1 are left out.

    Differentiated, it computes the gradients chunk by chunk while the logits are at hand, so that they are made once.
    """

    def add_chunk(total, chunk):
        nats, _ = _chunk_nats(*chunk, weight)
        return total + nats, None

    zero = jnp.zeros((), at_least_float32(features).dtype)
    return jax.lax.scan(add_chunk, zero, _chunks(features, targets))[0]


def _chunks(features, targets):
    """(chunks, tokens of a chunk, …), cut along each sequence: sharded sequences stay where they are."""
    *sequences, tokens, width = features.shape
    count = min(-(-targets.size // CHUNK), tokens)
    size = -(-tokens // count)
    padding = [(0, 0)] * len(sequences) + [(0, count * size - tokens)]
    features = jnp.pad(features, [*padding, (0, 0)]).reshape(*sequences, count, size, width)
    targets = jnp.pad(targets, padding, constant_values=NO_TARGET).reshape(*sequences, count, size)
    return jnp.moveaxis(features, -3, 0).reshape(count, -1, width), jnp.moveaxis(targets, -2, 0).reshape(count, -1)


def _joined(chunks, shape):
    """The opposite of `_chunks` for features: padding away, back to (*sequences, tokens, width)."""
    *sequences, tokens, width = shape
    chunks = chunks.reshape(chunks.shape[0], *sequences, -1, width)
    return jnp.moveaxis(chunks, 0, -3).reshape(*sequences, -1, width)[..., :tokens, :]


def _chunk_nats(features, targets, weight):
    logits = head(features, weight)
    normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    counted = targets != NO_TARGET
    chosen = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=-1)
    return jnp.sum(jnp.where(counted[:, None], normalizer - chosen, 0.0)), (logits, normalizer, counted)


def _forward(features, weight, targets):
    dtype = at_least_float32(features).dtype

    def add_chunk(carry, chunk):
        total, d_weight = carry
        chunk_features, chunk_targets = chunk
        nats, (logits, normalizer, counted) = _chunk_nats(*chunk, weight)
        hit = jnp.arange(logits.shape[-1]) == chunk_targets[:, None]
        error = (jnp.where(counted[:, None], jnp.exp(logits - normalizer) - hit, 0.0)).astype(features.dtype)
        d_weight += jnp.einsum("tv,td->vd", error, chunk_features, preferred_element_type=dtype)
        d_features = jnp.einsum("tv,vd->td", error, weight, preferred_element_type=dtype)
        return (total + nats, d_weight), d_features.astype(features.dtype)

    start = (jnp.zeros((), dtype), jnp.zeros(weight.shape, dtype))
    (total, d_weight), d_features = jax.lax.scan(add_chunk, start, _chunks(features, targets))
    return total, (_joined(d_features, features.shape), d_weight.astype(weight.dtype))


def _backward(saved, d_total):
    d_features, d_weight = saved
    return (d_total * d_features).astype(d_features.dtype), (d_total * d_weight).astype(d_weight.dtype), None


cross_entropy.defvjp(_forward, _backward)
