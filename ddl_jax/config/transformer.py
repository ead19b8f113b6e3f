"""The settings of the Transformer around the residual stream."""

import dataclasses
from typing import Literal

from ddl_jax.config.residual import ResidualConfig
from ddl_jax.config.rules import filled, require, require_least, require_types, require_unset
from ddl_jax.errors import nearest_multiples

Dtype = Literal["auto", "float32", "bfloat16", "float64"]
Attention = Literal["auto", "xla", "cudnn"]
Remat = Literal["none", "elementwise", "branch", "layer"]


def hidden_width(width: int) -> int:
    """Of the MLP: floor(8d / 3): three matrices then cost what two of hidden width 4d would."""
    return 8 * width // 3


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only Transformer over a residual stream.

    Attributes:
        layers: L, blocks of one attention and one MLP sublayer each.
        width: d, features of the residual state.
        heads: attention heads.
        head_dim: features of a head, even (width / heads).
        context_length: longest sequence, in tokens.
        vocab_size: rows of the embedding (the tokenizer's size, rounded up to a multiple of 64).
        qk_norm: RMSNorm with gain on queries and keys, after RoPE.
        head_norm: RMSNorm with gain on what each head gives.
        output_gate: what each head gives is normalised, as with head_norm, and multiplied by silu of a projection of
            the context, feature by feature.
        logit_scale: `none`, or `mup`: logits times logit_base_width / width.
        logit_base_width: of the model whose logits `mup` leaves as they are (1024).
        attention: what computes attention: `cudnn` (flash attention on NVIDIA GPUs, in bfloat16), `xla`, or `auto`:
            cuDNN where the program is compiled for GPUs and cuDNN takes the heads, else XLA.
        compute_dtype: of matrix products; `auto` is bfloat16 on a GPU and float32 elsewhere, or float64 with
            jax_enable_x64, which `float64` takes. A GPU multiplies float32 in TF32 unless jax_default_matmul_precision
            says otherwise.
        state_dtype: of the residual state; `auto` as above.
        remat: what backward computes again, to keep less: `none`; `elementwise`: norms, RoPE and activations, not
            matrix products; `branch`: the sublayers' output projections, too; `layer`: whole layers.
        residual: see `ResidualConfig`.
    """

    layers: int = 4
    width: int = 256
    heads: int = 2
    head_dim: int | None = None
    context_length: int = 256
    vocab_size: int | None = None
    qk_norm: bool = True
    head_norm: bool = False
    output_gate: bool = False
    logit_scale: Literal["none", "mup"] = "none"
    logit_base_width: int | None = None
    attention: Attention = "auto"
    compute_dtype: Dtype = "auto"
    state_dtype: Dtype = "auto"
    remat: Remat = "none"
    residual: ResidualConfig = ResidualConfig()

    def resolve(self, path: str = "model") -> "TransformerConfig":
        """Fills in what follows from other fields (vocab_size and dtypes excepted); raises InputError."""
        require_types(self, path)
        require_least(self, path, 1, "layers", "width", "heads", "head_dim", "context_length", "vocab_size")
        for name, most in (("width", 2**20), ("vocab_size", 2**24)):
            value = getattr(self, name)
            require(self, path, name, value is None or value <= most, "is too large", f"nearest: {most}")
        config, derived = self, ""
        if config.logit_scale == "mup":
            config = filled(config, logit_base_width=1024)  # the official code's
            require_least(config, path, 1, "logit_base_width")
        else:
            require_unset(config, path, ("logit_base_width",), f"logit_scale is {config.logit_scale!r}")
        if config.head_dim is None:
            rule = f"is not divisible by {path}.heads {config.heads}"
            legal = f"nearest: {nearest_multiples(config.width, config.heads)}"
            require(config, path, "width", config.width % config.heads == 0, rule, legal)
            derived = f" (it is width {config.width} / heads {config.heads})"
            config = filled(config, head_dim=config.width // config.heads)
        legal = f"nearest: {nearest_multiples(config.head_dim, 2)}"
        require(config, path, "head_dim", config.head_dim % 2 == 0, f"must be even for RoPE{derived}", legal)
        return dataclasses.replace(config, residual=config.residual.resolve(config.width, f"{path}.residual"))

    def with_vocabulary(self, size: int, path: str = "model") -> "TransformerConfig":
        """Settles vocab_size for a tokenizer of the given size; raises InputError where it is too small."""
        config = filled(self, vocab_size=-(-size // 64) * 64)
        fits, rule = config.vocab_size >= size, f"is smaller than the tokenizer's vocabulary, {size}"
        require(config, path, "vocab_size", fits, rule, f"nearest: {size}")
        return config
