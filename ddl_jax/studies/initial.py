"""How large the first updates of a model are, before any training."""

import json
from pathlib import Path
import sys
import tempfile

from flax import nnx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from ddl_jax.config import Config
from ddl_jax.config.files import from_settings, load_file
from ddl_jax.data import NO_TARGET, prepare, train_batches
from ddl_jax.parameters import at
from ddl_jax.precision import at_least_float32
from ddl_jax.training.step import Batch, total_nats
from ddl_jax.transformer import Transformer, auto
from ddl_jax.transformer.block import SUBLAYERS

SEQUENCES = 8  # at most, of the first batch


def main(arguments: list[str]) -> int:
    """Prints {file: statistics} as JSON for configuration files that differ in the model alone."""
    configs = {file: from_settings(load_file(file)).resolve() for file in arguments}
    batch, vocabulary = _first_batch(next(iter(configs.values())))
    result = {file: _statistics(config, batch, vocabulary) for file, config in configs.items()}
    sys.stdout.write(json.dumps(result, allow_nan=False) + "\n")
    return 0


def first_updates(model: Transformer, batch: Batch) -> dict:
    """What each sublayer's first write does to the residual state.

    Args:
        model: of any kind of stream.
        batch: what it reads.

    Returns:
        `loss` (nats per token), and for each of the `sublayers`, in order: `relative_update`, ‖X' − X‖ / ‖X‖ of a
        token (root of the mean square over tokens), and `gate`, the mean β, or None where there is none. None stands
        for numbers that are not finite, too.
    """
    stream = model.stream
    state = stream.expand(model.embedding[...][batch.tokens])
    sublayers = []
    for i in range(stream.sublayers):
        norm, sublayer = at(model.blocks, i // SUBLAYERS).sublayers()[i % SUBLAYERS]
        x = stream.read(state, i)
        context = norm(x)
        branch = sublayer(context)
        after = stream.write(state, branch, context, x, i)
        shown = stream.diagnostics(state, branch, context, x, i)
        gate = _finite(jnp.mean(shown["gate"])) if "gate" in shown else None
        sublayers.append({"relative_update": _finite(_relative(state, after)), "gate": gate})
        state = after
    loss = total_nats(model, batch) / jnp.sum(batch.targets != NO_TARGET)
    return {"loss": _finite(loss), "sublayers": sublayers}


def _relative(
    before: Float[Array, "batch tokens channels width"], after: Float[Array, "batch tokens channels width"]
) -> Float[Array, ""]:
    before, after = at_least_float32(before), at_least_float32(after)
    change, size = (jnp.sum(state**2, axis=(-2, -1)) for state in (after - before, before))
    return jnp.sqrt(jnp.mean(change / size))


def _finite(value: Array) -> float | None:
    return float(value) if np.isfinite(value) else None


def _first_batch(config: Config) -> tuple[Batch, int]:
    """The first batch of a run, or some sequences of it, and the size of the tokenizer's vocabulary."""
    training, context = config.training, config.model.context_length
    with tempfile.TemporaryDirectory() as folder:  # for a tokenizer that is trained
        corpus = prepare(config.data, context, Path(folder))
    with train_batches(corpus.train, context, training.batch_size, config.seed) as batches:
        batch = next(batches)
    return Batch(*(jnp.asarray(batch[name][:SEQUENCES]) for name in ("tokens", "targets"))), corpus.tokenizer.vocab_size


def _statistics(config: Config, batch: Batch, vocabulary: int) -> dict:
    model = auto.decided(config.model.with_vocabulary(vocabulary), jax.devices()[:1])
    return first_updates(Transformer(model, rngs=nnx.Rngs(params=config.seed)), batch)
