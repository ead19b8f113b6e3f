"""The real training step of a configuration, compiled for H200s that are not here."""

from collections.abc import Sequence
import dataclasses
import functools
import math
import time
from typing import Any

import jax

from ddl_jax.config import Config
from ddl_jax.errors import InputError
from ddl_jax.residual.kernels import explain
from ddl_jax.training.sharding import make_mesh, placed_batch, placed_state
from ddl_jax.training.step import make_train_step, model_graph
from ddl_jax.transformer.auto import explain_attention, with_dtypes
from pallas_kernels import hopper
from pallas_kernels.hopper.program import Array
from pallas_kernels.hopper.stacks import stacks
from pallas_kernels.hopper.target import GPUS_PER_HOST

# Nothing can be measured here, so nothing is tuned: twice as fast to compile, the same instructions and buffers.
OPTIONS = {"xla_gpu_autotune_level": 0}


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled training step, as one device runs it.

    Attributes:
        cost: what it moves and computes.
        peak_bytes: the most memory that it takes at any time.
        parameter_bytes: of the parameters.
        optimizer_bytes: of the optimiser's state.
        saved: the arrays that are saved for backward, one slice for each layer; empty where layers are not scanned
            over.
        parameters: their number, on all devices together.
        kernels: which implementation the stream's operations have, and why.
        attention: which implementation attention has, and why.
        seconds: that tracing and compiling took.
    """

    cost: hopper.Cost
    peak_bytes: int
    parameter_bytes: int
    optimizer_bytes: int
    saved: tuple[Array, ...]
    parameters: int
    kernels: str
    attention: str
    seconds: float

    @property
    def saved_bytes(self) -> int:
        return sum(array.bytes for array in self.saved)


def devices_for(count: int) -> Sequence[jax.Device]:
    """H200s to compile for.

    Raises:
        InputError: more than fit into a host that do not fill hosts, or no compiler for them is installed.
    """
    if count > GPUS_PER_HOST and count % GPUS_PER_HOST:
        below = count // GPUS_PER_HOST * GPUS_PER_HOST
        nearest = f"nearest: {below}, {below + GPUS_PER_HOST}"
        raise InputError(f"--devices {count} does not fill hosts of {GPUS_PER_HOST} GPUs; {nearest}")
    try:
        return tuple(hopper.mesh({"device": count}).devices.flat)
    except hopper.MissingExtra as error:
        raise InputError(str(error)) from None


def settled(config: Config) -> Config:
    """The configuration with what a run on GPUs would settle: the vocabulary's size, and the dtypes for `auto`.

    Raises:
        InputError: the size of the vocabulary cannot be told without the data.
    """
    model = config.model
    if model.vocab_size is None:
        model = model.with_vocabulary(config.data.tokenizer_size())
    return dataclasses.replace(config, model=with_dtypes(model, devices_for(1)))


@functools.cache
def compiled_step(config: Config, devices: Sequence[jax.Device]) -> Step:
    """Compiles the training step, nothing but the step.

    Args:
        config: `settled`.
        devices: from `devices_for`.

    Raises:
        InputError: something to compile with is missing, or the devices do not divide the batch.
        UnknownCustomCall: the program calls something whose bytes are not known.
    """
    started = time.perf_counter()
    mesh = make_mesh(config, devices)
    config = config.on(len(devices))
    state, batch = placed_state(config, mesh), placed_batch(config, mesh)
    step = make_train_step(model_graph(config, devices), config, mesh)
    try:
        traced = hopper.trace(jax.jit(step, donate_argnums=0, compiler_options=OPTIONS), state, batch)
        compiled = hopper.compile_traced(traced)
    except hopper.MissingExtra as error:
        raise InputError(str(error)) from None
    program = hopper.parse(compiled.as_text())
    return Step(
        cost=hopper.cost(program, hopper.known_kernels(traced.jaxpr.jaxpr)),
        peak_bytes=compiled.memory_analysis().peak_memory_in_bytes,
        parameter_bytes=_bytes_on_one(state.parameters),
        optimizer_bytes=_bytes_on_one(state.optimizer),
        saved=tuple(stacks(program)),
        parameters=sum(leaf.size for leaf in jax.tree.leaves(state.parameters)),
        kernels=explain(config.model.residual, config.model.width, devices),
        attention=explain_attention(config.model, devices),
        seconds=time.perf_counter() - started,
    )


def _bytes_on_one(tree: Any) -> int:
    """Bytes of a tree's arrays on one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
