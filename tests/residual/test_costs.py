"""Costs of a stream against counts made by hand (d = 10, two sublayers, so three reads)."""

import pytest

from ddl_jax.config import GateConfig, ResidualConfig, ValueConfig
from ddl_jax.residual.costs import stream_costs

# FLOPs: expansion + 3 reads + 2 updates (‖h‖² and k: 30; kᵀX, X + β k wᵀ, v = W c: 2Vd each; gate: 20).
# Elements: expansion d + Vd; the rewrite Vd + d + Vd; a channel read fused with it d more; other reads Vd + d.
EXPECTED = {
    "additive": (ResidualConfig(kind="additive"), 2 * 10, 20 + 2 * 30),
    "delta V1": (ResidualConfig(value_channels=1), 2 * (30 + 60 + 20), 20 + 2 * 30),
    "delta repeat": (ResidualConfig(expansion="repeat"), 3 * 80 + 2 * (30 + 240 + 20), 50 + 2 * 100 + 50),
    "delta": (ResidualConfig(), 320 + 3 * 80 + 2 * (30 + 240 + 20), 50 + 2 * 100 + 50),
    "token": (ResidualConfig(reader="token"), 320 + 3 * 320 + 2 * (30 + 240 + 20), 50 + 2 * 90 + 3 * 50),
    "write_only": (ResidualConfig(kind="write_only", expansion="repeat"), 3 * 80 + 2 * (30 + 160 + 20), 300),
    "constant value": (
        ResidualConfig(value_channels=1, value=ValueConfig(constant=2.0), gate=GateConfig(hidden=3)),
        2 * (30 + 40 + 66),
        20 + 2 * 30,
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_costs_equal_a_count_by_hand(name):
    config, flops, elements = EXPECTED[name]
    assert tuple(stream_costs(config, width=10, sublayers=2)) == (flops, elements)
