"""Sizes by formula: the residual state, and what generation keeps of the tokens so far."""

from ddl_jax.config import TransformerConfig

ITEM_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


def state_bytes(config: TransformerConfig, sequences: int) -> int:
    """Of one residual state X: B·T·d·V·s.

    Args:
        config: resolved, the dtypes settled.
        sequences: B, of `context_length` tokens each.
    """
    tokens = sequences * config.context_length
    return tokens * config.width * config.residual.value_channels * ITEM_BYTES[config.state_dtype]


def cache_bytes(config: TransformerConfig, sequences: int) -> dict[str, int]:
    """What generating one more token needs of those before it, at the full context.

    Args:
        config: resolved, the dtypes settled.
        sequences: B.

    Returns:
        `keys_and_values` of attention, 2·L·B·T·H·D·s; `readers`, the states at the last K − 1 tokens,
        B·(K − 1)·d·V·s for each of the 2L + 1 reads of a token reader (TC); `expansion`, the embeddings of the last
        K − 1 tokens, B·(K − 1)·d·4 (EC; they are float32); `direction`, the keys and values of a one-head attention
        that makes k. Only those that there are.
    """
    residual, sublayers = config.residual, 2 * config.layers
    compute, state = ITEM_BYTES[config.compute_dtype], ITEM_BYTES[config.state_dtype]
    tokens = sequences * config.context_length
    found = {"keys_and_values": 2 * config.layers * tokens * config.heads * config.head_dim * compute}
    if residual.reader == "token":
        one = sequences * (residual.reader_taps - 1) * config.width * residual.value_channels * state
        found["readers"] = (sublayers + 1) * one
    if residual.expansion == "convolution":
        found["expansion"] = sequences * (residual.expansion_taps - 1) * config.width * ITEM_BYTES["float32"]
    if residual.direction == "attention":
        found["direction"] = 2 * sublayers * tokens * residual.direction_width * compute
    return found
