"""A model through a cache: the first tokens of all rows in one pass, then one token of each row at a time.

For the latter the model is laid out anew (`Decoder`): a tree for each layer, matrices in the compute dtype. A step for
one token reads every parameter and does little with it: by a scan over stacked layers, which slices each out of its
stack, it takes more than twice as long on a CPU.
"""

import dataclasses
import functools
from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ddl_jax.cache import Cache, Kept, first, following
from ddl_jax.config import TransformerConfig
from ddl_jax.parameters import at
from ddl_jax.residual import Connection
from ddl_jax.transformer import Transformer
from ddl_jax.transformer.block import SUBLAYERS, Block
from ddl_jax.transformer.model import dtype_of, head
from ddl_jax.transformer.norm import RMSNorm

Layer = tuple[Block, tuple[Connection, ...]]
Logits = Float[Array, "batch vocab"]


class Past(NamedTuple):
    """What is kept of the tokens so far."""

    column: Int[Array, ""]  # of the next token
    padding: Int[Array, " batch"]  # columns before each row's first token
    start: Kept  # of the expansion and the first read
    layers: tuple[Kept, ...]
    skipped: Int[Array, ""]  # sublayers that no row needed, over all steps (`ddl_jax.inference.skipping`)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decoder:
    """A model as a step takes it."""

    embedding: Float[Array, "vocab width"]
    expansion: nnx.Module
    first_reader: nnx.Module
    layers: tuple[Layer, ...]
    final_norm: RMSNorm
    head: Float[Array, "vocab width"]
    config: TransformerConfig = dataclasses.field(metadata={"static": True})


@jax.jit
def decoder(model: Transformer) -> Decoder:
    """Lays a model out for steps; takes as much memory again."""
    stream = model.stream
    blocks, connections = (
        jax.tree.map(lambda parameter: _stored(parameter, model.final_norm.dtype), stack, is_leaf=_is_parameter)
        for stack in (model.blocks, stream.connections())
    )
    return Decoder(
        embedding=model.embedding[...],
        expansion=stream.expansion,
        first_reader=at(stream.readers, 0),
        layers=tuple(_layer(blocks, connections, number) for number in range(model.config.layers)),
        final_norm=model.final_norm,
        head=model.head_weight(),
        config=model.config,
    )


def _is_parameter(node) -> bool:
    return isinstance(node, nnx.Variable)


def _stored(parameter: nnx.Param, dtype: jnp.dtype) -> nnx.Param:
    """In the dtype of the products that a parameter is used in, which those that a mesh divides are."""
    return parameter.replace(parameter[...].astype(dtype)) if any(parameter.axes) else parameter


def _layer(blocks: Block, connections: Connection, number: int) -> Layer:
    return at(blocks, number), tuple(at(connections, SUBLAYERS * number + i) for i in range(SUBLAYERS))


@functools.partial(jax.jit, static_argnames="slots")
def prefill(
    model: Transformer, tokens: Int[Array, "batch columns"], padding: Int[Array, " batch"] | None, *, slots: int
) -> tuple[Logits, Past]:
    """Takes in the first tokens of each row.

    Args:
        model: of any stream. Attention sees `context_length` tokens back, however many there are.
        tokens: padded on the left; what stands for padding does not matter.
        padding: how many columns come before each row's first token, which there must be; None: none, in any row.
        slots: tokens whose keys and values are kept: `context_length`, or fewer where fewer are to come in all.

    Returns:
        Logits of each row's next token, and what `step` goes on from.
    """
    stream = model.stream
    window = model.config.context_length
    now = first(tokens.shape[1], window, min(slots, window), padding)
    embedding = model.embedding[...][tokens]
    if padding is not None:
        embedding = jnp.where(now.positions[..., None] >= 0, embedding, 0)
    start = Cache(now, {})
    state = stream.expand(embedding, start)
    x = stream.read(state, 0, start)
    connections = jax.tree.map(lambda stack: stack.reshape(-1, SUBLAYERS, *stack.shape[1:]), stream.connections())

    def layer(carry, parameters):
        block, connections = parameters
        cache = Cache(now, {})
        state, x, _ = _through((block, tuple(at(connections, i) for i in range(SUBLAYERS))), *carry, cache)
        return (state, x), cache.kept

    (_, x), kept = jax.lax.scan(layer, (state, x), (model.blocks, connections))
    logits = head(model.final_norm(x[:, -1]), model.head_weight())
    past = Past(
        column=jnp.int32(tokens.shape[1]),
        padding=jnp.zeros(len(tokens), jnp.int32) if padding is None else padding,
        start=start.kept,
        layers=tuple(at(kept, number) for number in range(model.config.layers)),
        skipped=jnp.int32(0),
    )
    return logits, past


def step(decoder: Decoder, token: Int[Array, " batch"], past: Past) -> tuple[Logits, Past]:
    """Takes in one more token of each row; to be jitted, the past donated.

    Returns:
        Logits of each row's next token, and the past with this one.
    """
    keys = past.layers[0]["0/keys"]
    now = following(past.column, keys.shape[1], past.padding)
    start = Cache(now, past.start)
    embedding = decoder.embedding[token][:, None]
    state = decoder.expansion(embedding, start.of("expansion")).astype(dtype_of(decoder.config.state_dtype))
    x = decoder.first_reader(state, start.of("read 0"))
    skipped = past.skipped
    for layer, kept in zip(decoder.layers, past.layers, strict=True):
        state, x, here = _through(layer, state, x, Cache(now, kept))
        skipped += here
    logits = head(decoder.final_norm(x[:, 0]), decoder.head)
    return logits, past._replace(column=past.column + 1, skipped=skipped)


def _through(layer: Layer, state, x, cache: Cache):
    """The state after a layer, what comes to be read next, and how many sublayers no row needed."""
    block, connections = layer
    skipped = jnp.int32(0)
    for i, ((norm, sublayer), connection) in enumerate(zip(block.sublayers(), connections, strict=True)):
        here, context = cache.of(str(i)), norm(x)
        if connection.update.skip_below and cache.now.slot is not None:
            state, x, skip = _unless_needless(state, x, context, sublayer, connection, here)
            skipped += skip
        else:
            branch = sublayer(context, here)
            state, x = connection.write_then_read(state, branch, context, x, here)
    return state, x, skipped


def _unless_needless(state, x, context, sublayer, connection, cache: Cache):
    """One token through a sublayer, which is left out where every row's gate is below the threshold.

    β needs the context alone. What later tokens will look at is kept in either case.
    """
    update, write = connection.update, cache.of("write")
    remembered = sublayer.remember(context, cache)
    update.direction.remember(context, write)

    def written():
        branch = sublayer.recall(remembered, cache)
        return update.write(state, branch, context, x, write.copy())

    needless = jnp.all(update.gate(context) < update.skip_below)
    state = jax.lax.cond(needless, lambda: state, written)
    return state, connection.next_reader(state, cache.of("read")), needless.astype(jnp.int32)
