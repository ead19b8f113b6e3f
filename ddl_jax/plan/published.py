"""The paper's published figures, and which of its rows a configuration is."""

import functools
import importlib.resources
import json

from ddl_jax.config import TransformerConfig

# The paper's sizes, section "Experiments": (layers, width, heads, head_dim).
SIZES = {(12, 768, 6, 128): "small", (24, 1024, 8, 128): "medium"}
CHANNELS = 4  # of the paper's expanded models


@functools.cache
def _tables() -> dict:
    return json.loads(importlib.resources.files(__package__).joinpath("paper.json").read_text())


def source() -> str:
    """Where the figures are from, and what they are."""
    return _tables()["source"]


def row(config: TransformerConfig) -> tuple[str, str] | None:
    """The paper's (size, variant) that a resolved configuration is; None if it is none of them."""
    size = SIZES.get((config.layers, config.width, config.heads, config.head_dim))
    variant = _variant(config)
    return (size, variant) if size and variant and variant in _tables()["costs"][size] else None


def _variant(config: TransformerConfig) -> str | None:
    residual = config.residual
    if residual.kind == "additive":
        return "baseline"
    if residual.kind != "delta" or residual.direction != "sublayer":
        return None
    if (residual.value_channels, residual.reader, residual.expansion) == (1, "identity", "repeat"):
        return "scalar"
    name = {"channel": "cc", "token": "tc"}.get(residual.reader)
    if name is None or residual.value_channels != CHANNELS:
        return None
    return name if residual.expansion == "convolution" else f"{name}_no_ec"


def published(config: TransformerConfig) -> dict[str, float] | None:
    """What the paper reports for a resolved configuration; None if it has no such row.

    Returns:
        `throughput_ratio` of training and `memory_factor`, both to its baseline; `peak_memory_gb`; `params_millions`.
    """
    found = row(config)
    if found is None:
        return None
    size, variant = found
    costs = _tables()["costs"][size]
    speed = costs[variant]["train_ktokens_per_s"] / costs["baseline"]["train_ktokens_per_s"]
    return {
        "throughput_ratio": speed,
        "memory_factor": costs[variant]["peak_memory_factor"],
        "peak_memory_gb": costs[variant]["peak_memory_gb"],
        "params_millions": costs[variant]["params_millions"],
    }
