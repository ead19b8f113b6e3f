"""Batches: shuffled windows of the training text, and fixed ones of the validation text."""

from collections.abc import Iterator
import contextlib
import operator
from pathlib import Path
import signal
import sys
import tempfile

import numpy as np

from ddl_jax.data.stored import StoredTokens, Stretch
from ddl_jax.data.windows import Batch, Tokens, Windows
from ddl_jax.data.workers import end_with_parent

Part = tuple[int, int]  # (index, count)

# Target of the rows that fill up the last validation batch: no token, hence no loss.
NO_TARGET = -1
_PADDING = {"tokens": 0, "targets": NO_TARGET}


@contextlib.contextmanager
def train_batches(
    tokens: Tokens,
    context_length: int,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    workers: int = 0,
    *,
    part: Part = (0, 1),
) -> Iterator[Iterator[Batch]]:
    """Endless shuffled batches, for a `with` statement.

    The batch at step n depends on `seed` and n alone, not on `start_step` or `workers`. An epoch has every window once,
    in an order of its own; a batch may begin in one epoch and end in the next. The parts of a batch, one below the
    other, are that batch, whatever their number.

    Args:
        tokens: (tokens,) integers, or where they are stored; at least context_length + 1 of them in a row.
        context_length: T, tokens of a sequence.
        batch_size: B, sequences of a batch, over all parts.
        seed: of the order, within [0, 2**32).
        start_step: the step of the first batch.
        workers: processes that prepare batches; with 0 this one does.
        part: (index, count): only rows [index B / count, (index + 1) B / count) of each batch; no other window is read.

    Yields:
        An iterator of {"tokens": (rows, T) int32, "targets": (rows, T) int32}; rows: B, or those of the part. On
        leaving the `with` statement, by whatever way, the workers have ended.
    """
    import grain

    # Grain shuffles epoch e with seed + e. The seeds of a study are neighbours, and one's second epoch would be the
    # order of the other's first, were they not spread first.
    spread_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    with contextlib.ExitStack() as stack:
        if workers > 0 and isinstance(tokens, np.ndarray):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ddl-tokens-"))
            tokens = _store(tokens, Path(folder) / "tokens")
        windows = Windows(tokens, context_length)
        # Shuffled and batched as indices, before any process is involved: no worker count and no start changes a batch.
        indices = (
            grain.MapDataset.range(len(windows)).shuffle(spread_seed).repeat().batch(batch_size, drop_remainder=True)
        )
        # No threads: reading is a copy from memory, and their buffer would be batches that nobody asked for. Workers
        # read ahead, where files are not in memory yet.
        read_options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        mine = operator.itemgetter(_rows(batch_size, part))
        dataset = indices[start_step:].map(mine).map(windows).to_iter_dataset(read_options)
        if workers > 0:
            _parse_flags()
            options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)
            # Batches come through pipes: one in shared memory is leaked when Ctrl-C falls between its two hands.
            no_shared_memory = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
            dataset = grain.experimental.WithOptionsIterDataset(dataset, no_shared_memory)
            dataset = dataset.mp_prefetch(options, worker_init_fn=_begin_worker)
        iterator = iter(dataset)
        stack.callback(iterator.close)
        # A generator in between: closing it lets go of Grain's iterator, whoever still holds the stream. One that lives
        # until the interpreter ends complains there.
        yield stack.enter_context(contextlib.closing(batch for batch in iterator))


def validation_batches(
    tokens: Tokens, context_length: int, batch_size: int, batches: int, *, part: Part = (0, 1)
) -> list[Batch]:
    """The windows to evaluate on: always the same, spread evenly over the text.

    Args:
        tokens: (tokens,) integers, or where they are stored; at least context_length + 1 of them in a row.
        context_length: T, tokens of a sequence.
        batch_size: B, sequences of a batch, over all parts.
        batches: how many at most; a short text gives fewer.
        part: which rows of each batch, as for `train_batches`.

    Returns:
        Dicts as of `train_batches`, every window at most once; as many for every part. Where the windows do not fill
        the last batch, rows with targets -1 do.
    """
    return list(held_out(tokens, context_length, batch_size, batch_size * batches, part=part))


def held_out(
    tokens: Tokens, context_length: int, batch_size: int, most: int | None = None, *, part: Part = (0, 1)
) -> Iterator[Batch]:
    """The windows of `validation_batches`, batch by batch as they are read.

    Args:
        tokens, context_length, batch_size, part: as there.
        most: windows at most, spread evenly over the text; by default all.
    """
    windows, rows = Windows(tokens, context_length), _rows(batch_size, part)
    count = len(windows) if most is None else min(len(windows), most)
    evenly = np.arange(count) * len(windows) // max(count, 1)
    for start in range(0, count, batch_size):
        yield _filled(windows(evenly[start : start + batch_size][rows]), rows.stop - rows.start)


def _store(tokens: np.ndarray, path: Path) -> StoredTokens:
    tokens.tofile(path)
    return StoredTokens((Stretch(str(path), tokens.dtype.str, 0, len(tokens)),), int(tokens.max()) + 1)


def _rows(batch_size: int, part: Part) -> slice:
    """Which rows of a batch the part holds."""
    index, count = part
    return slice(index * batch_size // count, (index + 1) * batch_size // count)


def _filled(batch: Batch, rows: int) -> Batch:
    """The batch with padding up to so many rows."""
    padding = ((0, rows - len(batch["tokens"])), (0, 0))
    return {name: np.pad(batch[name], padding, constant_values=value) for name, value in _PADDING.items()}


def _parse_flags() -> None:
    # Workers read absl flags, and crash where the program never parsed any (google/grain#1355).
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def _begin_worker(index: int, count: int) -> None:
    """Runs first in a worker: when to stop is its parent's decision alone."""
    # Ctrl-C, or a scheduler's SIGTERM, reaches the workers too, while the parent still needs batches to end its step.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
