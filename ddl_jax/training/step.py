"""One optimiser step, as a pure function of the training state and a batch."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int
import optax

from ddl_jax.config import Config
from ddl_jax.data import NO_TARGET
from ddl_jax.partition import BATCH_AXES, gathered_once, on_each_device, placed
from ddl_jax.training.loss import cross_entropy
from ddl_jax.training.optimizer import learning_rate_schedule, make_optimizer
from ddl_jax.transformer import Transformer, auto
from ddl_jax.transformer.model import dtype_of


class TrainState(NamedTuple):
    """All that a step changes; all that a checkpoint holds."""

    step: Int[Array, ""]  # steps done
    parameters: nnx.State
    optimizer: optax.OptState


class Batch(NamedTuple):
    """Sequences of tokens and, at each position, the token that follows (−1: not counted)."""

    tokens: Int[Array, "sequences tokens"]
    targets: Int[Array, "sequences tokens"]


def _model(config: Config, token_axes: tuple[str, ...] | None = None) -> Transformer:
    return Transformer(config.model, rngs=nnx.Rngs(params=config.seed), token_axes=token_axes)


def model_graph(config: Config, devices: Sequence[jax.Device] | None = None) -> nnx.GraphDef:
    """The model's structure, to be merged with parameters.

    Args:
        config: resolved.
        devices: those that it is compiled for, where that is known; what can be decided by them then is. A structure
            made without may be compiled for any.
    """
    token_axes = None
    if devices is not None:
        token_axes = BATCH_AXES if len(devices) > 1 else None
        config = dataclasses.replace(config, model=auto.decided(config.model, devices))
    return nnx.graphdef(nnx.eval_shape(lambda: _model(config, token_axes)))


def init_state(config: Config) -> TrainState:
    """The state at step 0: a pure function of the configuration."""
    parameters = nnx.state(_model(config), nnx.Param)
    optimizer = make_optimizer(config.optimizer, config.training.steps)
    return TrainState(jnp.int32(0), parameters, optimizer.init(parameters))


def _microbatches(batch: Batch, size: int | None) -> Batch:
    """The batch's arrays as (microbatches, sequences, tokens); by default one microbatch of all."""
    sequences = batch.tokens.shape[0]
    return jax.tree.map(lambda a: a.reshape(-1, size or sequences, *a.shape[1:]), batch)


def total_nats(model: Transformer, batch: Batch, *, unroll: int = 1) -> Float[Array, ""]:
    """The sum over the batch's counted targets of the negative log-likelihood, in nats."""
    return cross_entropy(model.features(batch.tokens, unroll=unroll), model.head_weight(), batch.targets)


def make_train_step(graph: nnx.GraphDef, config: Config, mesh: Mesh | None = None):
    """The function (state, batch) → (state, metrics), to be jitted with the state donated.

    Gradients are accumulated over microbatches as sums over tokens and divided once by the batch's token count, so that
    the result does not depend on the microbatch size, wherever the ignored targets are. On a mesh, each device does so
    for its own sequences, and the sums over devices are taken once a step; those of layers that `fsdp` divides once for
    each microbatch, since no device has room for the whole gradient.

    Args:
        graph: of the model.
        config: resolved.
        mesh: with the axes of `partition.MESH_AXES`, where the state and the batch are placed on it
            (`training.sharding`).
    """
    training = config.training
    optimizer = make_optimizer(config.optimizer, training.steps)
    schedule = learning_rate_schedule(config.optimizer, training.steps)

    def nats(parameters: nnx.State, batch: Batch):
        return total_nats(nnx.merge(graph, parameters), batch, unroll=training.unroll)

    def accumulated(parameters: nnx.State, batch: Batch):
        microbatches = _microbatches(batch, training.microbatch_size)
        if microbatches.tokens.shape[0] == 1:
            return jax.value_and_grad(nats)(parameters, batch)

        def add(total, microbatch):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(nats)(parameters, microbatch)), None

        total = jnp.zeros((), jnp.promote_types(dtype_of(config.model.compute_dtype), jnp.float32))
        start = (total, jax.tree.map(jnp.zeros_like, parameters))
        return jax.lax.scan(add, start, microbatches)[0]

    @functools.partial(on_each_device, mesh=mesh, gradient=True)
    def nats_and_gradient(parameters: nnx.State, batch: Batch):
        parameters, scatter = jax.vjp(gathered_once, parameters)
        total, gradient = accumulated(parameters, batch)
        return total, *scatter(gradient)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        total, gradient = nats_and_gradient(state.parameters, batch)
        count = jnp.sum(batch.targets != NO_TARGET)
        gradient = jax.tree.map(lambda g: g / count, gradient)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.parameters)
        parameters = optax.apply_updates(state.parameters, updates)
        metrics = {
            "loss": total / count,
            "grad_norm": optax.tree.norm(gradient),
            "parameter_norm": optax.tree.norm(parameters),
            "learning_rate": schedule(state.step),
        }
        return placed(TrainState(state.step + 1, parameters, optimizer_state), mesh), metrics

    return train_step


def make_evaluation_step(graph: nnx.GraphDef, config: Config, mesh: Mesh | None = None):
    """The function (parameters, batch) → sum of nats, to be jitted; arguments and microbatches as in training."""
    training = config.training

    @functools.partial(on_each_device, mesh=mesh, gradient=False)
    def evaluation_step(parameters: nnx.State, batch: Batch) -> Float[Array, ""]:
        model = nnx.merge(graph, gathered_once(parameters))
        microbatches = _microbatches(batch, training.microbatch_size)
        return jnp.sum(jax.lax.map(lambda b: total_nats(model, b, unroll=training.unroll), microbatches))

    return evaluation_step
