"""Compiling for H200s on a machine without one, and reading what came of it."""

import collections
import functools
import math
import pathlib
import re

import jax
from jax.experimental import topologies
from jax.sharding import Mesh
import numpy as np

_COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(-start)?\(", re.MULTILINE
)
_KERNEL = re.compile(r'custom_call_target="mosaic_gpu[^"]*".*?op_name="[^"]*?(\w+)/\w+"')


@functools.cache
def _devices(count):
    target = (pathlib.Path(__file__).parent / "h200.txtpb").read_text()
    topology = topologies.get_topology_desc("h200", platform="cuda", target_config=target, topology=f"1x1x{count}")
    return topology.devices


def mesh(axes, axis_types=None):
    """A mesh of H200s: sizes by name."""
    devices = np.array(_devices(math.prod(axes.values()))).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=axis_types)


def compile_for(function, *arguments):
    """The program for the H200s that `arguments`, of `jax.ShapeDtypeStruct`s, are placed on."""
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).compile()


def collectives(compiled):
    """The shapes of each kind of collective: {"all-reduce": ["f32[4,256]"]}."""
    found = collections.defaultdict(list)
    for shape, operation, _ in _COLLECTIVE.findall(compiled.as_text()):
        found[operation].append(re.findall(r"\w+\[[\d,]*\]", shape)[-1])
    return dict(found)


def kernels(compiled):
    """How often each kernel is called."""
    return dict(collections.Counter(_KERNEL.findall(compiled.as_text())))
