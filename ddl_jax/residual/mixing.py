"""What hyper-connections of every kind share: streams, one to a channel, that are read, written to and mixed.

    read:   x  = m_pre H                          H (n, d): the streams of a token; m_pre (n)
    write:  H' = M_res H + m_postᵀ F(norm(x))     m_post (n), M_res (n, n)

The two kinds differ in where the three come from. All are computed from the state that the sublayer reads, which is the
one that it writes into, so that a reader holds what makes m_pre and an update what makes m_post and M_res.
"""

from flax import nnx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ddl_jax.cache import Cache, of
from ddl_jax.precision import at_least_float32

State = Float[Array, "batch tokens channels width"]
Features = Float[Array, "batch tokens width"]
PerStream = Float[Array, "*#batch_and_tokens channels"]
Mixing = Float[Array, "*#batch_and_tokens channels channels"]


class StreamReader(nnx.Module):
    """x = m_pre H, in float32."""

    FINAL: float  # the value of `static` that, all other parameters being 0, makes each entry of m_pre 1

    def weights(self, state: State) -> PerStream:
        """m_pre, of each token or of all."""
        raise NotImplementedError

    def __call__(self, state: State, cache: Cache | None = None) -> Features:
        return mixed(self.weights(state)[..., None, :], state)[..., 0, :].astype(state.dtype)


class StreamUpdate(nnx.Module):
    """H' = M_res H + m_postᵀ h, in float32."""

    skip_below = 0.0  # it has no gate

    def coefficients(self, state: State) -> tuple[PerStream, Mixing]:
        """m_post and M_res, of each token or of all."""
        raise NotImplementedError

    def write(self, state: State, branch: Features, context: Features, x: Features, cache: Cache | None = None):
        """The new state."""
        output, mixing = self.coefficients(state)
        h = at_least_float32(branch)[..., None, :]
        return (mixed(mixing, state) + output[..., None] * h).astype(state.dtype)

    def write_then_read(self, state: State, branch: Features, context: Features, x: Features, reader, cache=None):
        """The new state and what `reader` sees of it."""
        state = self.write(state, branch, context, x)
        return state, reader(state, of(cache, "read"))

    def diagnostics(self, state: State, branch: Features, context: Features, x: Features) -> dict[str, Array]:
        """`mixing_distance` (B, T): ‖M_res − I‖ (Frobenius), 0 where each stream is carried on by itself."""
        _, mixing = self.coefficients(state)
        distance = jnp.linalg.norm(mixing - jnp.eye(mixing.shape[-1]), axis=(-2, -1))
        return {"mixing_distance": jnp.broadcast_to(distance, state.shape[:2])}


def mixed(weights: Float[Array, "*#batch_and_tokens rows channels"], state: State) -> Float[Array, "... rows width"]:
    """Σ_j weights_ij H_j, in float32. Written as a sum: products of matrices this small are slow, token by token."""
    streams = jnp.moveaxis(at_least_float32(state), -2, 0)
    return sum(weights[..., j, None] * stream[..., None, :] for j, stream in enumerate(streams))


def unit_rms(x: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]:
    """x divided by its root mean square, in float32. A gain would come to nothing that the next product cannot do."""
    x = at_least_float32(x)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def with_sum(readers: StreamReader) -> StreamReader:
    """A stack of readers, and behind it the final read: the sum over streams, which has no parameters.

    It is the read of constants, so that a scan over the stack comes to it as to any other reader.

    Args:
        readers: a stack.
    """

    last = jax.tree.map(lambda stack: jnp.zeros_like(stack[:1]), readers)
    last.static[...] = jnp.full_like(last.static[...], readers.FINAL)
    return jax.tree.map(lambda *stacks: jnp.concatenate(stacks), readers, last)
