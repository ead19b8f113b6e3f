"""The blocks of a model over its residual stream: a scan, whose backward pass keeps the states or walks them back."""

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jaxtyping import Array, Float

from ddl_jax.parameters import at
from ddl_jax.remat import BRANCH, remat
from ddl_jax.residual import DeltaStream, reversible
from ddl_jax.transformer.block import SUBLAYERS, Block

State = Float[Array, "batch tokens channels width"]
Features = Float[Array, "batch tokens width"]


def final_read(blocks: Block, stream: DeltaStream, state: State, policy: str, unroll: int) -> Features:
    """What the last reader sees, after every block has written into the stream.

    Args:
        blocks: a stack.
        stream: with SUBLAYERS updates for each block.
        state: the first one.
        policy: of `model.remat`.
        unroll: layers per iteration of the scan.
    """
    connections = jax.tree.map(_by_block, stream.connections())
    run = _walked if stream.config.backward == "reversible" else _kept
    return run(blocks, connections, stream, state, policy, unroll)


def _by_block(stack: Array) -> Array:
    """The leading axis, over sublayers, as one over blocks and one within."""
    return stack.reshape(-1, SUBLAYERS, *stack.shape[1:])


def _kept(blocks, connections, stream, state, policy, unroll):
    def sublayer(state, x, norm, sublayer, connection):
        context = norm(x)
        branch = checkpoint_name(sublayer(context), BRANCH)
        return connection.write_then_read(state, branch, context, x)

    def layer(carry, parameters):
        block, connections = parameters
        for i, parts in enumerate(block.sublayers()):
            carry = remat(sublayer, "none" if policy == "layer" else policy)(*carry, *parts, at(connections, i))
        return carry, None

    body = remat(layer, policy) if policy == "layer" else layer
    (_, x), _ = jax.lax.scan(body, (state, stream.read(state, 0)), (blocks, connections), unroll=unroll)
    return x


def _walked(blocks, connections, stream, state, policy, unroll):
    readers = at(stream.readers, jnp.array(stream.readers_used[:-1]))
    # To read the same again, no more: a reader's gradient is taken where x is made.
    readers = jax.lax.stop_gradient(jax.tree.map(_by_block, readers))

    def layer(carry, parameters):
        block, connections, readers = parameters
        for i, (norm, sublayer) in enumerate(block.sublayers()):
            connection = at(connections, i)
            parts = reversible.Sublayer(at(readers, i), norm, sublayer, connection.update, connection.next_reader)
            carry = reversible.sublayer(parts, *carry, policy)
        return carry, None

    start = reversible.read(at(stream.readers, stream.readers_used[0]), state, jnp.zeros_like(state))
    (state, x, shadow), _ = jax.lax.scan(layer, start, (blocks, connections, readers), unroll=unroll)
    return reversible.seal(x, state, shadow)
