"""Sizes by formula."""

import dataclasses

import pytest

from ddl_jax.config import ResidualConfig, TransformerConfig
from ddl_jax.plan.sizes import cache_bytes, state_bytes

SMALL = TransformerConfig(
    layers=12, width=768, heads=6, head_dim=128, context_length=1024, compute_dtype="bfloat16", state_dtype="bfloat16"
)


def model(base: TransformerConfig = SMALL, **residual) -> TransformerConfig:
    return dataclasses.replace(base, residual=ResidualConfig(**residual)).resolve()


KEYS_AND_VALUES = 2 * 12 * 8 * 1024 * 768 * 2


@pytest.mark.parametrize("residual, channels, others", [
    ({"kind": "additive"}, 1, {}),
    ({"reader": "channel", "expansion": "repeat"}, 4, {}),
    ({"reader": "channel", "expansion": "convolution"}, 4, {"expansion": 8 * 3 * 768 * 4}),
    ({"reader": "token", "reader_taps": 3, "expansion": "repeat"}, 4, {"readers": 25 * 8 * 2 * 768 * 4 * 2}),
    ({"value_channels": 1, "direction": "attention"}, 1, {"direction": 2 * 24 * 8 * 1024 * 192 * 2}),
])  # fmt: skip
def test_the_state_and_what_generation_keeps(residual, channels, others):
    config = model(**residual)
    assert state_bytes(config, 8) == 8 * 1024 * 768 * channels * 2
    assert cache_bytes(config, 8) == {"keys_and_values": KEYS_AND_VALUES} | others
    wide = dataclasses.replace(config, state_dtype="float32")
    assert state_bytes(wide, 8) == 2 * state_bytes(config, 8)
