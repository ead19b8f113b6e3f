"""Every kind of residual stream and the settings that change what it computes: one list, one suite over all of it.

A new kind, or a new setting of one, enters here and has passed when `test_conformance.py` has.
"""

from ddl_jax.config import GateConfig, ResidualConfig, ValueConfig

OFFICIAL = {"preset": "official_code"}
TWO_LAYER = GateConfig(hidden=5)

STREAMS: dict[str, ResidualConfig] = {
    "additive": ResidualConfig(kind="additive"),
    # The expanded control: every reader, both expansions.
    "additive_expanded": ResidualConfig(kind="additive_expanded"),
    "additive_expanded token repeat": ResidualConfig(
        kind="additive_expanded", value_channels=2, reader="token", expansion="repeat"
    ),
    "additive_expanded official": ResidualConfig(kind="additive_expanded", value_channels=2, **OFFICIAL),
    # Readers, expansions and numbers of channels, in both presets.
    "delta": ResidualConfig(),
    "delta V1": ResidualConfig(value_channels=1),
    "delta V1 channel convolution": ResidualConfig(value_channels=1, reader="channel", expansion="convolution"),
    "delta V1 token": ResidualConfig(value_channels=1, reader="token", gate=TWO_LAYER),
    "delta V2 repeat": ResidualConfig(value_channels=2, expansion="repeat"),
    "delta V4 token": ResidualConfig(reader="token"),
    "delta V2 token repeat": ResidualConfig(value_channels=2, reader="token", expansion="repeat", reader_taps=2),
    "delta shared": ResidualConfig(value_channels=2, shared_reader=True),
    "delta convolution from the mean": ResidualConfig(value_channels=2, reader_form="convolution"),
    "delta normal readers": ResidualConfig(value_channels=2, reader_initial="normal", expansion_taps=2),
    "official": ResidualConfig(**OFFICIAL),
    "official V1": ResidualConfig(value_channels=1, **OFFICIAL),
    "official V2 repeat": ResidualConfig(value_channels=2, expansion="repeat", gate=TWO_LAYER, **OFFICIAL),
    "official V4 token repeat": ResidualConfig(reader="token", expansion="repeat", **OFFICIAL),
    "official V2 token": ResidualConfig(value_channels=2, reader="token", shared_reader=False, **OFFICIAL),
    # Gate and value.
    "delta two-layer gate": ResidualConfig(value_channels=2, gate=TWO_LAYER, expansion="repeat"),
    "delta value of the read": ResidualConfig(value_channels=2, value=ValueConfig(source="read", bias=True)),
    "delta value of the branch": ResidualConfig(value_channels=2, value=ValueConfig(source="branch", scale=0.5)),
    "delta sigmoid value": ResidualConfig(value_channels=2, value=ValueConfig(activation="sigmoid", scale=4.0)),
    "delta constant value": ResidualConfig(value_channels=1, value=ValueConfig(constant=2.0)),
    # Directions that are not the sublayer's output.
    "delta mlp": ResidualConfig(value_channels=2, direction="mlp", direction_width=3),
    "delta attention": ResidualConfig(value_channels=2, direction="attention", direction_width=3, expansion="repeat"),
    "official mlp V1": ResidualConfig(value_channels=1, direction="mlp", **OFFICIAL),
    # The write-only control.
    "write_only": ResidualConfig(kind="write_only"),
    "write_only V1": ResidualConfig(kind="write_only", value_channels=1),
    "write_only token official": ResidualConfig(
        kind="write_only", value_channels=2, reader="token", gate=TWO_LAYER, **OFFICIAL
    ),
    "write_only attention": ResidualConfig(kind="write_only", value_channels=2, direction="attention"),
    # Hyper-connections. Of one stream, a norm takes back what its reader does, so that V = 1 is not among them.
    "hyper_connections": ResidualConfig(kind="hyper_connections"),
    "hyper_connections V2": ResidualConfig(kind="hyper_connections", value_channels=2),
    "hyper_connections static": ResidualConfig(kind="hyper_connections", dynamic=False),
    "hyper_connections static V2": ResidualConfig(kind="hyper_connections", value_channels=2, dynamic=False),
    "mhc": ResidualConfig(kind="mhc"),
    "mhc V3": ResidualConfig(kind="mhc", value_channels=3),
}


def mixes_tokens(config: ResidualConfig) -> bool:
    """Whether the stream itself carries anything from one token to a later one."""
    return config.reader == "token" or config.expansion == "convolution" or config.direction == "attention"
