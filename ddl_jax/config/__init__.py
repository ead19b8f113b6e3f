"""Every setting of an experiment, as frozen dataclasses, and every rule about them.

A field whose default is None follows from the others (the preset, the kind of stream, the number of channels);
`resolve` fills it in, or leaves None where the field does not apply. No other room validates a setting.
"""

from ddl_jax.config.data import DataConfig
from ddl_jax.config.distributed import DistributedConfig
from ddl_jax.config.experiment import Config
from ddl_jax.config.mesh import MeshConfig
from ddl_jax.config.residual import PRESETS, GateConfig, ResidualConfig, ValueConfig
from ddl_jax.config.training import OptimizerConfig, TrainingConfig
from ddl_jax.config.transformer import TransformerConfig

__all__ = [
    "PRESETS",
    "Config",
    "DataConfig",
    "DistributedConfig",
    "GateConfig",
    "MeshConfig",
    "OptimizerConfig",
    "ResidualConfig",
    "TrainingConfig",
    "TransformerConfig",
    "ValueConfig",
]
