"""The reversible residual state: backward walks it down the depth again, and nobody keeps it (design 2.2).

Forward computes w, V numbers per token. With h and β that is all it takes to undo an edit, X = X' − β k wᵀ. The state
comes to backward as the cotangent of a second one, the shadow S, which forward hands through untouched:

    X, x, S = read(reader, X, S)
    X, x, S = sublayer(parts, X, x, S)        as often as there are sublayers
    x = seal(x, X, S)

With the state, what was read from it is there again: not even x is kept, from which norm and sublayer start. What is
kept of each sublayer instead is h (or with remat `branch` not even that), so that it is no more than a plain residual
addition keeps.
"""

import functools
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ddl_jax.remat import remat
from ddl_jax.residual.direction import SublayerDirection

State = Float[Array, "batch tokens channels width"]
Features = Float[Array, "batch tokens width"]


class Sublayer(NamedTuple):
    """The modules of one sublayer.

    Attributes:
        reader: what x was read with.
        norm: x → context.
        sublayer: with `hidden(context)`, of which backward keeps the result, and `branch(hidden)`, the output.
        update: of the stream, with `edit` and `reversible_write_then_read`.
        next_reader: what the next x is read with.
    """

    reader: nnx.Module
    norm: nnx.Module
    sublayer: nnx.Module
    update: nnx.Module
    next_reader: nnx.Module


@jax.custom_vjp
def read(reader: nnx.Module, state: State, shadow: State) -> tuple[State, Features, State]:
    """(X, S) → (X, x, S), without keeping the X that the reader's gradient takes."""
    return state, reader(state), shadow


def _read_backward(reader, cotangents):
    d_state, d_x, state = cotangents
    _, transposed = jax.vjp(lambda reader, state: reader(state), reader, state)
    d_reader, through_x = transposed(d_x)
    return d_reader, d_state + through_x, state


read.defvjp(lambda reader, state, shadow: (read(reader, state, shadow), reader), _read_backward)


@jax.custom_vjp
def seal(x: Features, state: State, shadow: State) -> Features:
    """Ends the stack with x, the final read. The one state that is kept, X, starts the walk back."""
    return x


seal.defvjp(lambda x, state, shadow: (x, state), lambda state, d_x: (d_x, jnp.zeros_like(state), state))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def sublayer(
    parts: Sublayer, state: State, x: Features, shadow: State, policy: str = "none"
) -> tuple[State, Features, State]:
    """(X, x, S) → (X', x', S): norm, sublayer, edit and the next read.

    Args:
        parts: the modules. The gradient of `parts.reader` is not taken here, but where x was read.
        state: X.
        x: what `parts.reader` sees of X.
        shadow: S.
        policy: of `model.remat`; the norm is computed again with each of them.
    """
    return _forward(parts, state, x, shadow, policy)[0]


def _hidden(sublayer, context):
    return sublayer.hidden(context)


def _edit(sublayer, update, hidden, context, x):
    return update.edit(sublayer.branch(hidden), context, x)


def _write(update, next_reader, state, shadow, h, v, β):
    return update.reversible_write_then_read(state, shadow, h, v, β, next_reader)


class _Kept(NamedTuple):
    """For backward. The transposed functions come without arguments: parameters, and what can be had again."""

    hidden: Any
    h: Any
    of_hidden: Any
    of_edit: Any
    of_write: Any


def _forward(parts, state, x, shadow, policy):
    context = parts.norm(x)
    hidden, of_hidden = jax.vjp(remat(_hidden, policy), parts.sublayer, context, saveable_args=False)
    arguments = (parts.sublayer, parts.update, hidden, context, x)
    edit, of_edit = jax.vjp(remat(_edit, policy), *arguments, saveable_args=False)
    arguments = (parts.update, parts.next_reader, state, shadow, *edit)
    written, of_write = jax.vjp(_write, *arguments, saveable_args=(False,) * 5 + (True, True))
    # Without x only the sublayer's own output can be had again: x takes X, and X takes h.
    again = policy == "branch" and isinstance(parts.update.direction, SublayerDirection)
    hidden, of_hidden = (None, None) if policy == "layer" else (hidden, of_hidden)
    return written, (parts, _Kept(hidden, None if again else edit[0], of_hidden, of_edit, of_write))


def _backward(policy, saved, cotangents):
    parts, kept = saved
    h = parts.sublayer.branch(kept.hidden) if kept.h is None else kept.h
    given = [parts.update, parts.next_reader, *kept.of_write.args_res[2:4], h, *kept.of_write.args_res[5:]]
    d_update, d_next_reader, d_state, state, *d_edit = kept.of_write.replace(args_res=given)(cotangents)

    # The state before the edit is there now, and so is what was read from it.
    x = parts.reader(state)
    context, of_norm = jax.vjp(lambda norm, x: norm(x), parts.norm, x)
    if kept.hidden is None:
        hidden, of_hidden = jax.vjp(_hidden, parts.sublayer, context)
    else:
        hidden, of_hidden = kept.hidden, kept.of_hidden.replace(args_res=[parts.sublayer, context])
    given = [parts.sublayer, parts.update, hidden, context, x]
    d_sublayer, d_update_too, d_hidden, d_context, d_x = kept.of_edit.replace(args_res=given)(tuple(d_edit))
    d_sublayer_too, d_context_too = of_hidden(d_hidden)
    d_norm, d_x_too = of_norm(d_context + d_context_too)

    d_parts = Sublayer(
        reader=jax.tree.map(jnp.zeros_like, parts.reader),
        norm=d_norm,
        sublayer=jax.tree.map(jnp.add, d_sublayer, d_sublayer_too),
        update=jax.tree.map(jnp.add, d_update, d_update_too),
        next_reader=d_next_reader,
    )
    return d_parts, d_state, d_x + d_x_too, state


sublayer.defvjp(_forward, _backward)
