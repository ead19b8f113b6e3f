"""How fast batches come, with nobody training on them."""

from pathlib import Path
import statistics
import tempfile
import time

from ddl_jax.config import Config
from ddl_jax.data import prepare, train_batches

BATCHES = 16  # of a round: more than workers have ready, so that their making is timed and not their delivery


def measure_input(config: Config, rounds: int) -> dict[str, float]:
    """Times the training batches of a configuration's corpus.

    Args:
        config: resolved.
        rounds: timed rounds, of `BATCHES` batches each, after one that is not counted.

    Returns:
        `input_tokens_per_second` (median), `batch_seconds` (median), `workers`, and `train_tokens` of the corpus.

    Raises:
        InputError: the corpus cannot be used.
    """
    with tempfile.TemporaryDirectory(prefix="ddl-bench-") as folder:  # for the tokenizer, which nobody keeps
        corpus = prepare(config.data, config.model.context_length, Path(folder))
    seconds = []
    batch_size, length = config.training.batch_size, config.model.context_length
    with train_batches(corpus.train, length, batch_size, config.seed, workers=config.data.workers) as batches:
        for _ in range(1 + rounds):
            begun = time.perf_counter()
            for _ in range(BATCHES):
                next(batches)
            seconds.append((time.perf_counter() - begun) / BATCHES)
    batch_seconds = statistics.median(seconds[1:])
    return {
        "input_tokens_per_second": batch_size * length / batch_seconds,
        "batch_seconds": batch_seconds,
        "workers": config.data.workers,
        "train_tokens": len(corpus.train),
    }
