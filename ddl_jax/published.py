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


def source(of: str = "tables") -> str:
    """Where the figures are from, and what they are: the `tables`, or its `costs`."""
    return _tables()[{"tables": "source", "costs": "costs_source"}[of]]


def size(config: TransformerConfig) -> str | None:
    """The paper's size, `small` or `medium`, that a resolved configuration has; None if it has neither."""
    return SIZES.get((config.layers, config.width, config.heads, config.head_dim))


def row(config: TransformerConfig) -> tuple[str, str] | None:
    """The paper's (size, variant) that a resolved configuration is; None if it is none of them."""
    found, variant = size(config), _variant(config)
    return (found, variant) if found and variant else None


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


def costs(config: TransformerConfig) -> dict[str, float] | None:
    """What the paper reports of costs for a resolved configuration; None if it has no such row.

    Returns:
        `throughput_ratio` of training and `memory_factor`, both to its baseline; `peak_memory_gb`; `params_millions`.
    """
    found = row(config)
    if found is None:
        return None
    rows, variant = _tables()["costs"][found[0]], found[1]
    if variant not in rows:  # no medium scalar model
        return None
    speed = rows[variant]["train_ktokens_per_s"] / rows["baseline"]["train_ktokens_per_s"]
    return {
        "throughput_ratio": speed,
        "memory_factor": rows[variant]["peak_memory_factor"],
        "peak_memory_gb": rows[variant]["peak_memory_gb"],
        "params_millions": rows[variant]["params_millions"],
    }


def accuracies(size: str, shots: int) -> dict[str, dict[str, float]]:
    """Per cent of each task's questions, and their `average`, by variant.

    Args:
        size: `small` or `medium`.
        shots: solved examples before each question, 0 or 1.
    """
    return _tables()[{0: "accuracy_zero_shot", 1: "accuracy_one_shot"}[shots]][size]


def validation_losses(size: str) -> dict[str, float]:
    """Nats per token on the paper's validation set, by variant, for `small` or `medium`."""
    return _tables()["validation_loss"][size]
