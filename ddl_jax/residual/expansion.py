"""From the embedding (B, T, d) to the first residual state (B, T, V, d)."""

from flax import nnx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ddl_jax.cache import Cache
from ddl_jax.config import ResidualConfig
from ddl_jax.parameters import weight
from ddl_jax.precision import at_least_float32
from pallas_kernels.rewrite.xla import over_channels
from pallas_kernels.token_read.xla import along_tokens

State = Float[Array, "batch tokens channels width"]
Features = Float[Array, "batch tokens width"]


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

    def __call__(self, embedding: Features, cache: Cache | None = None) -> State:
        batch, tokens, width = embedding.shape
        return jnp.broadcast_to(embedding[:, :, None], (batch, tokens, self.channels, width))


class ConvolutionExpansion(nnx.Module):
    """EC: a depthwise causal convolution over K tokens, X_ji[t] = Σ_s a_sji e_i[t−s], that starts as the repetition."""

    def __init__(self, config: ResidualConfig, width: int, rngs: nnx.Rngs):
        identity = jnp.zeros((config.expansion_taps, config.value_channels, width)).at[0].set(1.0)
        self.taps = weight(identity)

    def __call__(self, embedding: Features, cache: Cache | None = None) -> State:
        if cache is not None:
            before = self.taps.shape[0] - 1
            return _convolved(cache.with_history(embedding, before), self.taps[...])[:, -embedding.shape[1] :]
        return _convolved(embedding, self.taps[...])


@jax.custom_vjp
def _convolved(e: Float[Array, "batch tokens width"], a: Float[Array, "taps channels width"]):
    taps, channels, _ = a.shape
    past = [delayed(at_least_float32(e), s) for s in range(taps)]
    # Channel by channel, as in `pallas_kernels.token_read.xla`.
    return jnp.stack([sum(a[s, j] * past[s] for s in range(taps)) for j in range(channels)], axis=-2)


def _convolved_backward(saved, d_state):
    """de[t] = Σ_s Σ_j a_sj dX_j[t+s];  da_sj = Σ_t e[t−s] dX_j[t].

    Written out to sum over the channels before the shift: what is shifted is V times smaller than the state.
    """
    e, a = saved
    tokens = e.shape[1]
    d_e = sum(along_tokens(over_channels(tap, d_state), 0, s)[:, s : s + tokens] for s, tap in enumerate(a))
    d_a = [
        jnp.sum(delayed(at_least_float32(e), s)[:, :, None] * at_least_float32(d_state), axis=(0, 1))
        for s in range(len(a))
    ]
    return d_e.astype(e.dtype), jnp.stack(d_a).astype(a.dtype)


_convolved.defvjp(lambda e, a: (_convolved(e, a), (e, a)), _convolved_backward)


EXPANSIONS = {"repeat": RepeatExpansion, "convolution": ConvolutionExpansion}
