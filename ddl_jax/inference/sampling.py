"""The next token, drawn from its logits."""

from numbers import Integral, Real
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ddl_jax.config.rules import LARGEST_FLOAT, shown
from ddl_jax.errors import InputError

SMALLEST = 1e-37  # a float32 that is not rounded to 0, nor its inverse to infinity
KINDS = {"temperature": Real, "top_k": Integral | None, "top_p": Real | None}


class Sampling(NamedTuple):
    """How a token is drawn.

    Attributes:
        temperature: the logits are divided by it; 0 takes the likeliest token.
        top_k: only the k likeliest tokens.
        top_p: only the likeliest tokens that together have at least this probability, after temperature and top_k.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def validate(self) -> None:
        """Raises InputError on a broken rule."""
        for name, kind in KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                whole = "whole " if name == "top_k" else ""
                raise InputError(f"{name} {shown(value)} must be a {whole}number")
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature {self.temperature} must be at least 0 and finite; nearest: 0")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k {self.top_k} must be at least 1; nearest: 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p {self.top_p} must lie in (0, 1]; typical: 0.9")


DEFAULT = Sampling()


def draw(logits: Float[Array, "batch vocab"], keys: Array, sampling: Sampling) -> Int[Array, " batch"]:
    """A token for each row.

    Args:
        logits: float32.
        keys: (batch,) of `jax.random`, so that a row's tokens do not depend on the other rows.
        sampling: valid.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)  # stays finite at the likeliest, however cold it is
    logits = logits / min(max(sampling.temperature, SMALLEST), LARGEST_FLOAT)
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        share = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(share, axis=-1) - share  # of the likelier tokens; of the likeliest, 0
        least = jnp.min(jnp.where(before < max(sampling.top_p, SMALLEST), ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
