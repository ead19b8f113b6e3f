"""What each policy of `model.remat`, `model.residual.backward` and the dtypes would keep for backward."""

from collections.abc import Iterator, Sequence
import dataclasses
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from ddl_jax.config import Config
from ddl_jax.config.transformer import hidden_width
from ddl_jax.remat import POLICIES
from ddl_jax.training.step import Batch, init_state, model_graph, total_nats
from ddl_jax.transformer.costs import flops_per_token

PRECISIONS = (("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32"))


def policies(config: Config, devices: Sequence[jax.Device]) -> list[dict[str, Any]]:
    """Every choice of what backward keeps, in the configuration's precision, then every precision with its choice.

    Args:
        config: settled for the devices.
        devices: those planned for.

    Returns:
        For each: `remat`, `backward` (None for kinds without an update), `compute_dtype`, `state_dtype`, `kept_bytes`
        for a micro-batch on one device (where heads and hidden features are not divided), `again`, the FLOPs of matrix
        products that backward computes again as a share of the step's, and `chosen`.
    """
    return [
        {
            "remat": other.model.remat,
            "backward": other.model.residual.backward,
            "compute_dtype": other.model.compute_dtype,
            "state_dtype": other.model.state_dtype,
            "kept_bytes": kept_bytes(other, devices),
            "again": computed_again(other),
            "chosen": other == config,
        }
        for other in _choices(config)
    ]


def _choices(config: Config) -> Iterator[Config]:
    residual = config.model.residual
    for backward in (None,) if residual.backward is None else ("saved", "reversible"):
        for remat in POLICIES:
            yield _with(config, remat=remat, residual=dataclasses.replace(residual, backward=backward))
    for compute_dtype, state_dtype in PRECISIONS:
        other = _with(config, compute_dtype=compute_dtype, state_dtype=state_dtype)
        if other != config:
            yield other


def _with(config: Config, **model: Any) -> Config:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **model))


def kept_bytes(config: Config, devices: Sequence[jax.Device]) -> int:
    """Bytes that the layers give to backward for a micro-batch, parameters and what is made of them left out.

    Traced, not compiled: XLA may keep less.
    """
    # Both implementations of the stream keep the same, and XLA's is traced faster.
    config = _with(config, residual=dataclasses.replace(config.model.residual, kernel="xla"))
    graph, sequences = model_graph(config, devices[:1]), config.training.microbatch_size
    tokens = jax.ShapeDtypeStruct((sequences, config.model.context_length), jnp.int32)

    def transposed(parameters, batch):
        nats = lambda parameters: total_nats(nnx.merge(graph, parameters), batch)  # noqa: E731
        return jax.vjp(nats, parameters, saveable_args=False)[1]

    parameters = jax.eval_shape(lambda: init_state(config).parameters)
    kept = jax.tree.leaves(jax.eval_shape(transposed, parameters, Batch(tokens, tokens)))
    layers = [leaf for leaf in kept if leaf.ndim > 2 and leaf.shape[0] == config.model.layers]
    of_tokens = [leaf for leaf in layers if sequences in leaf.shape[1:3] or tokens.size in leaf.shape[1:3]]
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in of_tokens)


def computed_again(config: Config) -> float:
    """The matrix products that backward computes again, as a share of the step's FLOPs (by formula)."""
    model = config.model
    total, backward = flops_per_token(model), model.residual.backward
    outputs = 2 * model.layers * (model.heads * model.head_dim + hidden_width(model.width)) * model.width
    if model.remat == "layer":
        layers = total / 3 - 2 * model.vocab_size * model.width
        return (layers - outputs * (backward == "reversible")) / total  # which keeps the outputs
    # An addition's gradient does not ask for the output.
    adds = model.residual.kind in ("additive", "additive_expanded")
    return outputs / total if model.remat == "branch" and not adds else 0.0
