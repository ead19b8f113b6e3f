"""Where the training state and a batch lie on the devices planned for: pure data parallelism.

Parameters and optimiser state are on every device, sequences are divided.
"""

from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np

from ddl_jax.config import Config
from ddl_jax.errors import InputError, nearest_divisors
from ddl_jax.training.step import Batch, TrainState, init_state


def make_mesh(config: Config, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of the devices: one axis, `data`."""
    return Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))


def placed_state(config: Config, mesh: Mesh) -> TrainState:
    """The training state as types with shardings."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    state = jax.eval_shape(lambda: init_state(config))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), state)


def placed_batch(config: Config, mesh: Mesh) -> Batch:
    """A batch as types with shardings."""
    shape = (config.training.batch_size, config.model.context_length)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    return Batch(tokens, tokens)


def step_config(config: Config, devices: int) -> Config:
    """The configuration of the step for all devices: the micro-batch of one device becomes that of all.

    Raises:
        InputError: they do not divide the batch.
    """
    training = config.training
    if training.batch_size % (training.microbatch_size * devices):
        divisors = "none" if training.batch_size % devices else None
        nearest = divisors or nearest_divisors(training.microbatch_size, training.batch_size // devices)
        raise InputError(
            f"training.microbatch_size {training.microbatch_size} on each of {devices} devices does not divide "
            f"training.batch_size {training.batch_size}; nearest: {nearest}"
        )
    training = dataclasses.replace(training, microbatch_size=training.microbatch_size * devices)
    return dataclasses.replace(config, training=training)
