"""The paper's figures, and which of its rows a configuration is."""

import dataclasses
from pathlib import Path

import pytest

from ddl_jax.command_line import config_parser, parse, read_config
from ddl_jax.config import ResidualConfig, TransformerConfig
from ddl_jax.published import accuracies, costs, row, validation_losses

SMALL = TransformerConfig(layers=12, width=768, heads=6, head_dim=128, context_length=1024)


def model(base: TransformerConfig = SMALL, **residual) -> TransformerConfig:
    return dataclasses.replace(base, residual=ResidualConfig(**residual)).resolve()


ROWS = ["baseline", "scalar", "tc_no_ec", "cc_no_ec", "tc", "cc", "write_only", "additive_expanded"]


@pytest.mark.parametrize("size", ["small", "medium"])
@pytest.mark.parametrize("name", ROWS)
def test_each_configuration_finds_its_row(size, name):
    parser = config_parser("test", "")
    config = read_config(parse(parser, ["--config", f"configs/{size}/{name}.yaml"])).model
    there = name not in ("write_only", "additive_expanded")  # the paper has no controls
    assert row(config) == ((size, name) if there else None)
    # Its medium cost table has no scalar row.
    assert (costs(config) is not None) == (there and (size, name) != ("medium", "scalar"))


def test_the_row_is_that_of_the_configuration_and_not_of_its_file():
    assert row(model(value_channels=1)) == ("small", "scalar")
    assert row(model(value_channels=2)) is None
    assert row(model(kind="write_only")) is None
    assert row(model(dataclasses.replace(SMALL, layers=11))) is None
    assert row(model(direction="mlp")) is None


def test_published_figures_are_ratios_to_the_papers_baseline():
    figures = costs(model(reader="channel", expansion="convolution"))
    assert figures["throughput_ratio"] == pytest.approx(1158.0 / 1509.6)
    assert (figures["memory_factor"], figures["params_millions"]) == (1.05, 123)
    assert costs(model(kind="additive"))["throughput_ratio"] == 1.0


def test_every_row_has_a_loss_and_the_accuracies_of_the_same_tasks():
    for size in ("small", "medium"):
        assert set(validation_losses(size)) == set(ROWS) - {"write_only", "additive_expanded"}
        for shots in (0, 1):
            rows = accuracies(size, shots)
            assert rows.keys() == validation_losses(size).keys()
            for name in rows:
                tasks = {task: figure for task, figure in rows[name].items() if task != "average"}
                # Figures are rounded to two digits, and the average is of those that are not.
                assert rows[name]["average"] == pytest.approx(sum(tasks.values()) / 8, abs=0.011)
    assert accuracies("small", 1)["cc"]["sciq"] == 82.6 and validation_losses("medium")["cc"] == 2.5758


def test_the_figures_travel_with_the_package():
    assert '"ddl_jax" = ["*.json"]' in Path("pyproject.toml").read_text()
