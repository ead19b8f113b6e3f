"""The mesh of a run, and the training state and batches on it."""

from collections.abc import Sequence
import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np

from ddl_jax.config import Config
from ddl_jax.partition import BATCH_AXES, MESH_AXES, shardings
from ddl_jax.training.step import Batch, TrainState, init_state


def make_mesh(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of a run, with the axes data, fsdp and tensor.

    Args:
        config: resolved.
        devices: all of them by default; those of a process, and those of a host, next to each other.

    Raises:
        InputError: `mesh.*`, the batch or the model do not divide over so many devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = config.on(len(devices)).mesh
    shape = (sizes.data, sizes.fsdp, sizes.tensor)
    return Mesh(np.array(devices).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(shape))


def placed_state(config: Config, mesh: Mesh) -> TrainState:
    """The training state as shapes, dtypes and shardings: to restore one, to compile for one."""
    shapes = jax.eval_shape(lambda: init_state(config))
    return jax.tree.map(_placed, shapes, shardings(shapes, mesh))


def placed_batch(config: Config, mesh: Mesh) -> Batch:
    """A batch of `training.batch_size` sequences, likewise."""
    shape = (config.training.batch_size, config.model.context_length)
    tokens = _placed(jax.ShapeDtypeStruct(shape, jnp.int32), batch_sharding(mesh))
    return Batch(tokens, tokens)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of tokens and targets: each device along data and fsdp has its own sequences."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def rows(config: Config, mesh: Mesh) -> tuple[int, int]:
    """(index, count): this process has the sequences [index·B/count, (index+1)·B/count) of each batch of B.

    Processes that share their sequences, as where `tensor` spans machines, have the same index. One whose sequences are
    no such part has all of them.
    """
    shape = (config.training.batch_size, config.model.context_length)
    parts = {
        part[0].indices(shape[0])[:2] for part in batch_sharding(mesh).addressable_devices_indices_map(shape).values()
    }
    return part_of(min(parts)[0], max(parts)[1], shape[0])


def part_of(start: int, stop: int, total: int) -> tuple[int, int]:
    """The rows [start, stop) of `total` as (index, count) of equal parts, or (0, 1) where they are no such part."""
    size = stop - start
    return (start // size, total // size) if start % size == 0 == total % size else (0, 1)


def place_rows(batch: Batch, config: Config, mesh: Mesh) -> Batch:
    """A batch on the mesh, of which each process gives the sequences that `rows` tells."""
    if rows(config, mesh) == (0, 1):
        return place_batch(batch, mesh)
    shape = (config.training.batch_size, config.model.context_length)
    place = functools.partial(jax.make_array_from_process_local_data, batch_sharding(mesh), global_shape=shape)
    return jax.tree.map(place, batch)


def place_batch(batch: Batch, mesh: Mesh) -> Batch:
    """A batch on the mesh, of which each process has all sequences."""
    place = functools.partial(jax.make_array_from_callback, sharding=batch_sharding(mesh))
    return jax.tree.map(lambda a: place(a.shape, data_callback=lambda index: a[index]), batch)


def first_state(config: Config, mesh: Mesh) -> TrainState:
    """The state at step 0, made where it belongs: the same numbers on every mesh."""
    shapes = jax.eval_shape(lambda: init_state(config))
    return jax.jit(lambda: init_state(config), out_shardings=shardings(shapes, mesh))()


def _placed(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
