"""One optimiser step, as a pure function of the training state and a batch."""

from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import optax

from ddl_jax.config import Config
from ddl_jax.data import NO_TARGET
from ddl_jax.training.loss import cross_entropy
from ddl_jax.training.optimizer import learning_rate_schedule, make_optimizer
from ddl_jax.transformer import Transformer, auto


class TrainState(NamedTuple):
    """All that a step changes; all that a checkpoint holds."""

    step: Int[Array, ""]  # steps done
    parameters: nnx.State
    optimizer: optax.OptState


class Batch(NamedTuple):
    """Sequences of tokens and, at each position, the token that follows (−1: not counted)."""

    tokens: Int[Array, "sequences tokens"]
    targets: Int[Array, "sequences tokens"]


def _model(config: Config) -> Transformer:
    return Transformer(config.model, rngs=nnx.Rngs(params=config.seed))


def model_graph(config: Config, devices: Sequence[jax.Device] | None = None) -> nnx.GraphDef:
    """The model's structure, to be merged with parameters.

    Args:
        config: resolved.
        devices: those that it is compiled for, where that is known; what can be decided by them then is. A structure
            made without may be compiled for any.
    """
    if devices is not None:
        config = dataclasses.replace(config, model=auto.decided(config.model, devices))
    return nnx.graphdef(nnx.eval_shape(lambda: _model(config)))


def init_state(config: Config) -> TrainState:
    """The state at step 0: a pure function of the configuration."""
    parameters = nnx.state(_model(config), nnx.Param)
    optimizer = make_optimizer(config.optimizer, config.training.steps)
    return TrainState(jnp.int32(0), parameters, optimizer.init(parameters))


def total_nats(model: Transformer, batch: Batch, *, unroll: int = 1) -> Float[Array, ""]:
    """The sum over the batch's counted targets of the negative log-likelihood, in nats."""
    return cross_entropy(model.features(batch.tokens, unroll=unroll), model.head_weight(), batch.targets)


def make_train_step(graph: nnx.GraphDef, config: Config):
    """The function (state, batch) → (state, metrics), to be jitted with the state donated.

    Gradients are accumulated over microbatches as sums over tokens and divided once by the batch's token count, so that
    the result does not depend on the microbatch size, wherever the ignored targets are.
    """
    training = config.training
    optimizer = make_optimizer(config.optimizer, training.steps)
    schedule = learning_rate_schedule(config.optimizer, training.steps)

    def nats(parameters: nnx.State, batch: Batch):
        return total_nats(nnx.merge(graph, parameters), batch, unroll=training.unroll)

    def nats_and_gradient(parameters: nnx.State, batch: Batch):
        micro = training.microbatch_size
        if batch.tokens.shape[0] == micro:
            return jax.value_and_grad(nats)(parameters, batch)

        def add(total, microbatch):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(nats)(parameters, microbatch)), None

        start = (jnp.float32(0), jax.tree.map(jnp.zeros_like, parameters))
        microbatches = jax.tree.map(lambda a: a.reshape(-1, micro, *a.shape[1:]), batch)
        return jax.lax.scan(add, start, microbatches)[0]

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
        return TrainState(state.step + 1, parameters, optimizer_state), metrics

    return train_step


def make_evaluation_step(graph: nnx.GraphDef, config: Config):
    """The function (parameters, batch) → sum of nats, to be jitted; one microbatch at a time, as in training."""
    training = config.training

    def evaluation_step(parameters: nnx.State, batch: Batch) -> Float[Array, ""]:
        model = nnx.merge(graph, parameters)
        microbatches = jax.tree.map(lambda a: a.reshape(-1, training.microbatch_size, *a.shape[1:]), batch)
        return jnp.sum(jax.lax.map(lambda b: total_nats(model, b, unroll=training.unroll), microbatches))

    return evaluation_step
