"""H200s to compile for, on a machine without a GPU."""

import functools
import importlib
import importlib.resources
import importlib.util
import math
import os

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh
import numpy as np

GPUS_PER_HOST = 8
PLUGIN = "jax_plugins.xla_cuda13"


class MissingExtra(ImportError):
    """A package of the extra compile is not installed."""


def mesh(axes: dict[str, int], axis_types: tuple[AxisType, ...] | None = None) -> Mesh:
    """A mesh of H200s to compile for, eight to a host.

    Args:
        axes: the size of each axis, by its name.
        axis_types: one for each axis; all `Auto` if left out.

    Raises:
        MissingExtra: the CUDA plugin of jax is not installed.
        ValueError: more than eight devices that do not fill their hosts.
    """
    devices = _devices(math.prod(axes.values()))
    return Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes), axis_types=axis_types)


@functools.cache
def _devices(count: int) -> list[jax.Device]:
    if importlib.util.find_spec(PLUGIN.split(".")[0]) is None or importlib.util.find_spec(PLUGIN) is None:
        raise MissingExtra("compiling for an H200 needs jax's CUDA 13 plugin: pip install -e '.[compile]'")
    if count > GPUS_PER_HOST and count % GPUS_PER_HOST:
        raise ValueError(f"{count} devices do not fill hosts of {GPUS_PER_HOST}")
    description = importlib.resources.files(__package__).joinpath("h200.txtpb").read_text()
    hosts = max(1, count // GPUS_PER_HOST)
    topology = f"1x{hosts}x{count // hosts}"  # slices, hosts, devices
    describe = functools.partial(
        topologies.get_topology_desc, "h200", platform="cuda", target_config=description, topology=topology
    )
    # Without a GPU, the plugin's check of drivers and libraries may fail; then jax has it not, and says so in a
    # traceback. Nothing that it looks for is needed to compile.
    check = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    before = os.environ.get(check)
    os.environ[check] = "1"
    try:
        return describe().devices
    except NotImplementedError:  # jax started, and gave up on the plugin, before it was told to skip the check
        importlib.import_module(PLUGIN).initialize()
        return describe().devices
    finally:
        if before is None:
            del os.environ[check]
        else:
            os.environ[check] = before
