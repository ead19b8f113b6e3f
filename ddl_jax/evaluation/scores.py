"""Log-likelihoods of given tokens after others, many at a time: sorted by length, in batches of few shapes."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from ddl_jax.data import NO_TARGET
from ddl_jax.evaluation.devices import Placed
from ddl_jax.evaluation.progress import Counted
from ddl_jax.partition import BATCH_AXES
from ddl_jax.training.loss import CHUNK
from ddl_jax.training.sharding import batch_sharding
from ddl_jax.transformer import Transformer
from ddl_jax.transformer.model import head

SHORTEST = 32  # tokens of a batch: below, the shapes would be many and save little


class Row(NamedTuple):
    """Attributes: `tokens`, and how many of them, the last `scored`, are to be scored after all that come before."""

    tokens: tuple[int, ...]
    scored: int


class Score(NamedTuple):
    """Attributes: `logprob`, the sum of ln p over the scored tokens; `greedy`: each was the most probable one."""

    logprob: float
    greedy: bool


def token_scores(
    model: Transformer, tokens: Int[Array, "rows tokens"], targets: Int[Array, "rows tokens"]
) -> tuple[Float[Array, "rows tokens"], Bool[Array, "rows tokens"]]:
    """ln p of each target, and whether no token is more probable; where the target is −1, anything.

    The head, a large part of a small model, sees the positions with a target alone, a chunk at a time: the logits of
    all never exist at once.
    """
    features = model.features(tokens)
    flat, weight = targets.reshape(-1), model.head_weight()
    features = features.reshape(flat.size, -1)
    chunk = min(CHUNK, flat.size)
    wanted = flat != NO_TARGET
    order = jnp.argsort(~wanted, stable=True)  # those with a target first
    order = jnp.pad(order, (0, -flat.size % chunk), constant_values=flat.size)  # out of bounds: written nowhere

    def score(number, found):
        logprobs, greedy = found
        places = jax.lax.dynamic_slice(order, [number * chunk], [chunk])
        logits = head(features.at[places].get(mode="clip"), weight)
        target = jnp.maximum(flat.at[places].get(mode="clip"), 0)
        chosen = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        logprob = chosen - jax.nn.logsumexp(logits, axis=-1)
        best = jnp.argmax(logits, axis=-1) == target
        return logprobs.at[places].set(logprob, mode="drop"), greedy.at[places].set(best, mode="drop")

    start = (jnp.zeros(flat.shape, jnp.float32), jnp.zeros(flat.shape, bool))
    chunks = -(-jnp.sum(wanted) // chunk)
    return jax.tree.map(lambda a: a.reshape(targets.shape), jax.lax.fori_loop(0, chunks, score, start))


def make_scoring_step(placed: Placed) -> Callable:
    """The compiled `token_scores` (parameters, tokens, targets), each device with rows of its own."""

    def step(parameters, tokens, targets):
        return token_scores(nnx.merge(placed.graph, parameters), tokens, targets)

    if placed.mesh.size > 1:
        rows = PartitionSpec(BATCH_AXES)
        step = jax.shard_map(
            step, mesh=placed.mesh, in_specs=(PartitionSpec(), rows, rows), out_specs=rows, check_vma=False
        )  # fmt: skip
    return jax.jit(step)


def padded_length(tokens: int, longest: int) -> int:
    """The length that a batch of so many tokens is filled up to: powers of two times 2 or 3, at most `longest`."""
    length = SHORTEST
    while length < tokens:
        length = length * 3 // 2 if length & (length - 1) == 0 else length * 4 // 3
    return min(length, longest)


class Scorer:
    """Scores rows with one run. Its batches are all of one size, and of the few lengths of `padded_length`.

    Args:
        placed: the run.
    """

    def __init__(self, placed: Placed):
        self._placed, self._step = placed, make_scoring_step(placed)
        self.longest = placed.config.model.context_length

    def __call__(self, rows: Iterable[Row]) -> dict[Row, Score]:
        """The score of each row, of equal ones once.

        Args:
            rows: of at most `longest` + 1 tokens.
        """
        size = self._placed.config.training.batch_size
        # The longest first: the time left is then overestimated, and what does not fit is known at once.
        distinct = sorted(set(rows), key=lambda row: (-len(row.tokens), row))
        scores: dict[Row, Score] = {}
        with Counted("scoring, rows", len(distinct)) as progress:
            for start in range(0, len(distinct), size):
                batch = distinct[start : start + size]
                scores |= zip(batch, self._scored(batch, size), strict=True)
                progress.advance(len(batch))
        return scores

    def _scored(self, batch: list[Row], size: int) -> Iterable[Score]:
        length = padded_length(len(batch[0].tokens) - 1, self.longest)
        tokens = np.zeros((size, length), np.int32)
        targets = np.full((size, length), NO_TARGET, np.int32)
        ends = [len(row.tokens) - 1 for row in batch]
        for i, (row, end) in enumerate(zip(batch, ends, strict=True)):
            tokens[i, :end] = row.tokens[:-1]
            targets[i, end - row.scored : end] = row.tokens[len(row.tokens) - row.scored :]
        placed = jax.device_put((tokens, targets), batch_sharding(self._placed.mesh))
        logprobs, greedy = jax.device_get(self._step(self._placed.parameters, *placed))
        for i, (row, end) in enumerate(zip(batch, ends, strict=True)):
            scored = slice(end - row.scored, end)
            yield Score(float(logprobs[i, scored].sum(dtype=np.float64)), bool(greedy[i, scored].all()))
