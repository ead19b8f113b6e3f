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
    # Two updates of M_res H (2V²d), m_post h and m_pre H (2Vd each); the sum at the end; norms and products before it.
    "static": (ResidualConfig(kind="hyper_connections", dynamic=False), 2 * (320 + 160) + 30, 50 + 2 * 90 + 3 * 50),
    "dynamic": (ResidualConfig(kind="hyper_connections"), 2 * (480 + 160 + 80 * 6) + 30, 50 + 2 * 90 + 3 * 50),
    "mhc": (ResidualConfig(kind="mhc", value_channels=2), 2 * (160 + 80 + 40 * 8) + 10, 30 + 2 * 50 + 3 * 30),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_costs_equal_a_count_by_hand(name):
    config, flops, elements = EXPECTED[name]
    assert tuple(stream_costs(config, width=10, sublayers=2)) == (flops, elements)
