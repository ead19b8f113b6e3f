"""FLOPs of the model by formula, from the configuration alone."""

from ddl_jax.config import TransformerConfig
from ddl_jax.config.transformer import hidden_width
from ddl_jax.residual.costs import stream_costs


def flops_per_token(config: TransformerConfig) -> int:
    """Floating-point operations of one training step, per token: three times the forward pass's (backward costs two).

    Forward, a multiply-add counting as two: every matrix once (4dHD + 3dm a layer, m = floor(8d/3), dHD more with an
    output gate, and the head's V·d), causal attention over half the context on average (2·T·H·D a layer), and the
    residual stream (`stream_costs`). Norms, RoPE, softmax and the optimiser are left out: they are below a per cent.
    """
    config = config.resolve()
    d, heads_width = config.width, config.heads * config.head_dim
    matrices = (4 + config.output_gate) * d * heads_width + 3 * d * hidden_width(d)
    attention = 2 * config.context_length * heads_width
    layers = config.layers * (2 * matrices + attention)
    stream = stream_costs(config.residual, d, sublayers=2 * config.layers).flops
    return 3 * (layers + 2 * config.vocab_size * d + stream)
