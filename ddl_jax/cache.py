"""What generation keeps of the tokens so far: keys and values, and the last inputs of causal convolutions.

A module that mixes tokens takes `cache=None`. Without one its input is a whole sequence. With one it is the next tokens
of each row: the module takes what it needs of those before from the cache, and leaves there what the next call will
need. Arrays live in a dictionary (`kept`), an ordinary pytree; a `Cache` is a view of it while a function is traced.

Rows of different lengths are padded on the left. Nothing else has to know: a padding token has the embedding 0, of
which every norm, product, convolution and edit makes 0 again (h = 0 ⇒ X' = X), so that it leaves no trace in a history.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Heads = Float[Array, "batch tokens heads dim"]
Kept = dict[str, Array]


class Now(NamedTuple):
    """The tokens that are being taken in, the same for all layers."""

    positions: Int[Array, "batch tokens"]  # of each token in its row, from 0; negative: padding
    mask: Bool[Array, "batch 1 tokens keys"] | None  # what each attends to; None: to itself and all before
    slot: Int[Array, ""] | None  # where keys and values of the one token go; None: these are the first tokens
    slots: int  # how many tokens' keys and values are kept


def first(tokens: int, window: int, slots: int, padding: Int[Array, " batch"] | None) -> Now:
    """The first tokens of each row.

    Args:
        tokens: how many columns, padding included.
        window: how many tokens attention sees, the current one included.
        slots: how many tokens' keys and values are kept, at most `window`.
        padding: of the columns, how many stand before each row's first token; None: none, in any row.
    """
    column = jnp.arange(tokens)
    if padding is None and tokens <= window:
        return Now(column[None], None, None, slots)
    padding = jnp.zeros(1, jnp.int32) if padding is None else padding
    query, key, before = column[:, None], column, padding[:, None, None]
    seen = (key <= query) & (key > query - window)
    # A padding token sees padding: a softmax over nothing would be one over everything.
    seen = seen & ((key >= before) | (query < before))
    return Now(column - padding[:, None], seen[:, None], None, slots)


def following(column: Int[Array, ""], slots: int, padding: Int[Array, " batch"]) -> Now:
    """One more token of each row, in the given column. The oldest of `slots` makes room for it."""
    slot = jnp.arange(slots)
    columns = column - (column - slot) % slots  # that each slot holds
    seen = columns >= padding[:, None]
    return Now((column - padding)[:, None], seen[:, None, None], column % slots, slots)


class Cache:
    """What one module keeps, or several, each under its name.

    Args:
        now: the tokens being taken in.
        kept: filled and changed in place; empty before the first tokens.
        path: in front of the names of what this module keeps.
    """

    def __init__(self, now: Now, kept: Kept, path: str = ""):
        self.now, self.kept, self.path = now, kept, path

    def of(self, name: str) -> "Cache":
        """The part that belongs to `name`."""
        return Cache(self.now, self.kept, f"{self.path}{name}/")

    def copy(self) -> "Cache":
        """A cache whose changes are nobody else's."""
        return Cache(self.now, dict(self.kept), self.path)

    def with_history(self, x: Float[Array, "batch tokens *rest"], steps: int) -> Float[Array, "batch more *rest"]:
        """x after the `steps` tokens before it, if there are any; the last `steps` of all are kept."""
        name = f"{self.path}history"
        whole = x if self.now.slot is None else jnp.concatenate([self.kept[name], x], axis=1)
        missing = [(0, 0), (max(steps - whole.shape[1], 0), 0)] + [(0, 0)] * (x.ndim - 2)
        self.kept[name] = jnp.pad(whole, missing)[:, max(whole.shape[1] - steps, 0) :]
        return whole

    def remember(self, key: Heads, value: Heads) -> None:
        """Keeps the tokens' keys and values."""
        for name, new in ((f"{self.path}keys", key), (f"{self.path}values", value)):
            if self.now.slot is None:
                self.kept[name] = _ring(new, self.now.slots)
            else:
                self.kept[name] = jax.lax.dynamic_update_slice_in_dim(self.kept[name], new, self.now.slot, axis=1)

    def recall(self, query: Heads) -> Heads:
        """What one token sees of the keys and values kept."""
        key, value = (self.kept[f"{self.path}{name}"] for name in ("keys", "values"))
        return _mixed(query, key, value, self.now.mask)


def of(cache: Cache | None, name: str) -> Cache | None:
    """The part of a cache that belongs to `name`, where there is a cache."""
    return None if cache is None else cache.of(name)


def _ring(x: Heads, slots: int) -> Heads:
    """The last tokens, each in the slot of its column modulo `slots`."""
    tokens = x.shape[1]
    if tokens <= slots:
        return jnp.pad(x, [(0, 0), (0, slots - tokens), (0, 0), (0, 0)])
    return jnp.roll(x[:, tokens - slots :], tokens % slots, axis=1)


def _mixed(query: Heads, key: Heads, value: Heads, mask: Bool[Array, "batch 1 tokens keys"]) -> Heads:
    if query.dtype == jnp.float64:
        return _in_float64(query, key, value, mask)
    return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation="xla")


def _in_float64(query: Heads, key: Heads, value: Heads, mask: Bool[Array, "#batch 1 tokens keys"]) -> Heads:
    """What jax's function gives, whose softmax is taken in float32 whatever comes in."""
    scores = jnp.einsum("bthd,bshd->bhts", query, key) / query.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min))
    return jnp.einsum("bhts,bshd->bthd", weights, value)


def attend(query: Heads, key: Heads, value: Heads, cache: Cache | None, implementation: str | None = None) -> Heads:
    """Causal attention, of whole sequences or through a cache."""
    if cache is not None:
        cache.remember(key, value)
        if cache.now.slot is not None:
            return cache.recall(query)
        if cache.now.mask is not None:
            return _mixed(query, key, value, cache.now.mask)
    if query.dtype == jnp.float64:
        return _in_float64(query, key, value, jnp.tril(jnp.ones((1, 1, query.shape[1], key.shape[1]), bool)))
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=implementation)
