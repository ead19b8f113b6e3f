"""The Transformer: embedding, blocks over a residual stream, tied head."""

from flax import nnx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ddl_jax.config import TransformerConfig
from ddl_jax.errors import InputError
from ddl_jax.parameters import normal, stacked
from ddl_jax.precision import at_least_float32
from ddl_jax.residual import DeltaStream
from ddl_jax.transformer import auto
from ddl_jax.transformer.block import SUBLAYERS, Block
from ddl_jax.transformer.norm import RMSNorm
from ddl_jax.transformer.stack import final_read


def dtype_of(name: str) -> jnp.dtype:
    """The dtype for a configured name.

    Raises:
        InputError: float64 without `jax_enable_x64`.
    """
    name = auto.dtype(jax.default_backend()) if name == "auto" else name
    if name == "float64" and auto.widest() != name:
        raise InputError("model.compute_dtype or model.state_dtype float64 needs jax_enable_x64 (JAX_ENABLE_X64=1)")
    return jnp.dtype(name)


class Transformer(nnx.Module):
    """A decoder-only language model.

    Args:
        config: sizes and the residual stream; None fields are filled in, but vocab_size must be given.
        rngs: the source of initial parameters.
        token_axes: see `DeltaStream`.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs, token_axes: tuple[str, ...] | None = None):
        config = config.resolve()
        if config.vocab_size is None:
            raise InputError("model.vocab_size null must be given where there is no tokenizer to take it from")
        dtype = dtype_of(config.compute_dtype)
        self.config = config
        # The stream is made last: models that differ only in it start from the same other parameters.
        self.embedding = normal(rngs, (config.vocab_size, config.width), 0.02, axes=(None, "width"))
        self.blocks = stacked(lambda rngs: Block(config, dtype, rngs), config.layers, rngs)
        self.final_norm = RMSNorm(config.width, dtype)
        self.stream = DeltaStream(
            config.residual, width=config.width, sublayers=SUBLAYERS * config.layers, rngs=rngs,
            dtype=dtype_of(config.state_dtype), token_axes=token_axes,
        )  # fmt: skip

    def __call__(self, tokens: Int[Array, "batch tokens"], *, unroll: int = 1) -> Float[Array, "batch tokens vocab"]:
        """Logits of the next token at every position, in float32."""
        return head(self.features(tokens, unroll=unroll), self.head_weight())

    def features(self, tokens: Int[Array, "batch tokens"], *, unroll: int = 1) -> Float[Array, "batch tokens width"]:
        """The normalised features that the head reads, in the compute dtype."""
        stream, longest = self.stream, self.config.context_length
        if tokens.shape[1] > longest:
            raise InputError(f"a sequence of {tokens.shape[1]} tokens exceeds model.context_length {longest}")
        state = stream.expand(self.embedding[...][tokens])
        return self.final_norm(final_read(self.blocks, stream, state, self.config.remat, unroll))

    def head_weight(self) -> Float[Array, "vocab width"]:
        """The tied head in the compute dtype, the logit scale included."""
        config = self.config
        scale = config.logit_base_width / config.width if config.logit_scale == "mup" else 1.0
        return (scale * self.embedding[...]).astype(self.final_norm.dtype)


def head(features: Float[Array, "*batch width"], weight: Float[Array, "vocab width"]) -> Float[Array, "*batch vocab"]:
    """Logits in float32, or of features in float64 in float64."""
    dtype = at_least_float32(features).dtype
    return jnp.einsum("...d,vd->...v", features, weight, preferred_element_type=dtype)
