"""A loaded run on all devices of this machine: its parameters on each, the rows of a batch divided among them."""

import dataclasses
from typing import NamedTuple

from flax import nnx
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddl_jax.config import Config, MeshConfig
from ddl_jax.errors import InputError, nearest_multiples
from ddl_jax.run import Run
from ddl_jax.training.sharding import make_mesh
from ddl_jax.training.step import model_graph

ROWS = 16  # of a batch, for each device, by default


class Placed(NamedTuple):
    """Attributes: `config` of the run, for batches of `batch_size` sequences here; `mesh`; the model in two parts."""

    config: Config
    mesh: Mesh
    graph: nnx.GraphDef
    parameters: nnx.State


def on_all_devices(run: Run, batch_size: int | None = None) -> Placed:
    """Puts a run on all devices.

    Args:
        run: as loaded.
        batch_size: sequences of a batch, over all devices; by default 16 for each.

    Raises:
        InputError: the sequences do not divide over the devices.
    """
    devices = jax.devices()
    batch_size = ROWS * len(devices) if batch_size is None else batch_size
    if batch_size % len(devices):
        nearest = nearest_multiples(batch_size, len(devices))
        raise InputError(f"--batch-size {batch_size} does not divide over {len(devices)} devices; nearest: {nearest}")
    training = dataclasses.replace(run.config.training, batch_size=batch_size, microbatch_size=None)
    config = dataclasses.replace(run.config, mesh=MeshConfig(), training=training)
    mesh = make_mesh(config, devices)
    parameters = jax.device_put(nnx.state(run.model, nnx.Param), NamedSharding(mesh, PartitionSpec()))
    return Placed(config.on(len(devices)), mesh, model_graph(config, devices), parameters)
