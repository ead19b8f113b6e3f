"""Sizes by formula, and which of the paper's rows a configuration is."""

import dataclasses
from pathlib import Path

import pytest

from ddl_jax.command_line import config_parser, parse, read_config
from ddl_jax.config import ResidualConfig, TransformerConfig
from ddl_jax.plan.published import published, row
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


ROWS = ["baseline", "scalar", "tc_no_ec", "cc_no_ec", "tc", "cc", "write_only", "additive_expanded"]


@pytest.mark.parametrize("size", ["small", "medium"])
@pytest.mark.parametrize("name", ROWS)
def test_each_configuration_finds_its_row(size, name):
    parser = config_parser("test", "")
    config = read_config(parse(parser, ["--config", f"configs/{size}/{name}.yaml"])).model
    # The paper has no controls, and its medium cost table no scalar row.
    there = name not in ("write_only", "additive_expanded") and (size, name) != ("medium", "scalar")
    assert row(config) == ((size, name) if there else None)
    assert (published(config) is not None) == there


def test_the_row_is_that_of_the_configuration_and_not_of_its_file():
    assert row(model(value_channels=1)) == ("small", "scalar")
    assert row(model(value_channels=2)) is None
    assert row(model(kind="write_only")) is None
    assert row(model(dataclasses.replace(SMALL, layers=11))) is None
    assert row(model(direction="mlp")) is None


def test_published_figures_are_ratios_to_the_papers_baseline():
    figures = published(model(reader="channel", expansion="convolution"))
    assert figures["throughput_ratio"] == pytest.approx(1158.0 / 1509.6)
    assert (figures["memory_factor"], figures["params_millions"]) == (1.05, 123)
    assert published(model(kind="additive"))["throughput_ratio"] == 1.0


def test_the_figures_travel_with_the_package():
    assert '"ddl_jax.plan" = ["*.json"]' in Path("pyproject.toml").read_text()
