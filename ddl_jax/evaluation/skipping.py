"""What it costs to leave out edits with a nearly closed gate, and what it saves."""

import functools
import time
from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from ddl_jax.data import NO_TARGET, held_out
from ddl_jax.data.windows import Tokens
from ddl_jax.evaluation.devices import Placed
from ddl_jax.evaluation.progress import Counted
from ddl_jax.inference import decode, skipping
from ddl_jax.partition import on_each_device
from ddl_jax.run import Run
from ddl_jax.training.loss import CHUNK
from ddl_jax.training.sharding import place_batch
from ddl_jax.training.step import Batch
from ddl_jax.transformer.model import head

TIMED = 64  # tokens, one by one


class Sums(NamedTuple):
    """Over the counted targets."""

    full: jax.Array  # nats of the model
    skipping: jax.Array  # nats without the edits
    same: jax.Array  # how often both find the same token likeliest


def cost_of_skipping(run: Run, placed: Placed, tokens: Tokens, most: int, below: float) -> dict[str, float]:
    """The model beside itself without the edits whose gate is below a threshold.

    Args:
        run: as loaded.
        placed: the same on all devices.
        tokens: held out.
        most: windows of them to compare on.
        below: the threshold.

    Returns:
        `skip_below`; `loss_change` in nats per token, and `agreement`, the share of tokens after which both find the
        same next one likeliest, over the windows; and of one row of held-out text, token by token in turns on one
        device: `milliseconds_per_token`, `skipping_milliseconds_per_token` (medians), and `skipped_share` of sublayers.

    Raises:
        InputError: the model has no gates, or the threshold is none.
    """
    skips = skipping(run.model, below)
    config, length = placed.config, run.config.model.context_length
    compare = jax.jit(_comparison(placed, below))
    found, count = np.zeros(3), 0
    with Counted("skipping, windows", most) as progress:
        for batch in held_out(tokens, length, config.training.batch_size, most):
            sums = compare(placed.parameters, place_batch(Batch(**batch), placed.mesh))
            found += np.array([float(value) for value in sums])
            count += int(np.sum(batch["targets"] != NO_TARGET))
            progress.advance(int(np.sum(batch["targets"][:, 0] != NO_TARGET)))
    nats, skipping_nats, same = (found / count).tolist()
    row = next(iter(held_out(tokens, length, 1, 1)))["tokens"]
    return {
        "skip_below": below,
        "loss_change": skipping_nats - nats,
        "agreement": same,
        **_timed(run, skips, row),
    }


def _comparison(placed: Placed, below: float):
    @functools.partial(on_each_device, mesh=placed.mesh, gradient=False)
    def compare(parameters: nnx.State, batch: Batch) -> Sums:
        full = nnx.merge(placed.graph, parameters)
        weight, models = full.head_weight(), (full, skipping(full, below))
        targets = batch.targets.reshape(-1)
        chunk = min(CHUNK, targets.size)
        missing = -targets.size % chunk
        features = [jnp.pad(m.features(batch.tokens).reshape(targets.size, -1), ((0, missing), (0, 0))) for m in models]
        targets = jnp.pad(targets, (0, missing), constant_values=NO_TARGET)

        def add(total, chunked):
            *both, target = chunked
            logits = [head(features, weight) for features in both]
            counts, place = target != NO_TARGET, jnp.maximum(target, 0)[:, None]
            nats = [
                jax.nn.logsumexp(each, axis=-1) - jnp.take_along_axis(each, place, axis=-1)[:, 0] for each in logits
            ]
            same = jnp.argmax(logits[0], axis=-1) == jnp.argmax(logits[1], axis=-1)
            sums = Sums(*(jnp.sum(jnp.where(counts, values, 0.0)) for values in (*nats, same)))
            return jax.tree.map(jnp.add, total, sums), None

        chunks = [array.reshape(-1, chunk, *array.shape[1:]) for array in (*features, targets)]
        return jax.lax.scan(add, Sums(*jnp.zeros(3)), chunks)[0]

    return compare


def _timed(run: Run, skips, row: np.ndarray) -> dict[str, float]:
    """Both models through the second half of a row of held-out text, or its last tokens."""
    steps = min(TIMED, row.shape[1] // 2)
    prompt, rest = row[:, : row.shape[1] - steps], row[:, row.shape[1] - steps :]
    step = jax.jit(decode.step, donate_argnums=2)
    decoders = [decode.decoder(model) for model in (run.model, skips)]
    seconds = np.zeros((2, steps))
    for counted in (False, True):  # the first time compiles
        pasts = [decode.prefill(model, prompt, None, slots=row.shape[1])[1] for model in (run.model, skips)]
        for number in range(steps if counted else 1):
            for which in range(2):
                begun = time.perf_counter()
                logits, pasts[which] = step(decoders[which], rest[:, number], pasts[which])
                jax.block_until_ready(logits)
                seconds[which, number] = time.perf_counter() - begun
    full, without = (1e3 * np.median(seconds, axis=1)).tolist()
    sublayers = steps * run.model.stream.sublayers
    return {
        "milliseconds_per_token": full,
        "skipping_milliseconds_per_token": without,
        "skipped_share": int(pasts[1].skipped) / sublayers,
    }
