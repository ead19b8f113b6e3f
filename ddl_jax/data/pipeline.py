"""Batches: shuffled windows of the training text, and fixed ones of the validation text."""

from collections.abc import Iterator
import contextlib
import functools
import multiprocessing
import os
from pathlib import Path
import signal
import sys
import tempfile
import threading

import numpy as np

Batch = dict[str, np.ndarray]

# Target of the rows that fill up the last validation batch: no token, hence no loss.
NO_TARGET = -1
_PADDING = {"tokens": 0, "targets": NO_TARGET}


class Windows:
    """A text cut into windows of context_length + 1 tokens, each beginning with the last token of the one before.

    Args:
        tokens: (tokens,) integers.
        context_length: T, tokens of a sequence.
    """

    def __init__(self, tokens: np.ndarray, context_length: int):
        self.tokens = tokens
        self.context_length = context_length

    def __len__(self) -> int:
        # The first token of all is never a target.
        return max(len(self.tokens) - 1, 0) // self.context_length

    def __call__(self, indices: np.ndarray) -> Batch:
        """The windows of (B,) indices: `tokens` and, shifted by one, `targets`, both (B, T) int32."""
        positions = np.asarray(indices)[:, None] * self.context_length + np.arange(self.context_length)
        return {
            "tokens": self.tokens[positions].astype(np.int32),
            "targets": self.tokens[positions + 1].astype(np.int32),
        }


class StoredWindows(Windows):
    """Windows of a text in a .npy file, which reach another process as the file's name, not as its tokens."""

    def __init__(self, path: Path, context_length: int):
        super().__init__(np.load(path, mmap_mode="r"), context_length)
        self.path = path

    def __reduce__(self):
        return StoredWindows, (self.path, self.context_length)


@contextlib.contextmanager
def train_batches(
    tokens: np.ndarray,
    context_length: int,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    workers: int = 0,
    *,
    part: tuple[int, int] = (0, 1),
) -> Iterator[Iterator[Batch]]:
    """Endless shuffled batches, for a `with` statement.

    The batch at step n depends on `seed` and n alone, not on `start_step` or `workers`. An epoch has every window once,
    in an order of its own; a batch may begin in one epoch and end in the next.

    Args:
        tokens: (tokens,) integers, at least context_length + 1 of them.
        context_length: T, tokens of a sequence.
        batch_size: B, sequences of a batch.
        seed: of the order, within [0, 2**32).
        start_step: the step of the first batch.
        workers: processes that prepare batches; with 0 this one does.
        part: (index, count): only rows [index·B/count, (index+1)·B/count) of each batch.

    Yields:
        An iterator of {"tokens": (B, T) int32, "targets": (B, T) int32}. On leaving the `with` statement, by whatever
        way, the workers have ended.
    """
    import grain

    # Grain shuffles epoch e with seed + e. The seeds of a study are neighbours, and one's second epoch would be the
    # order of the other's first, were they not spread first.
    spread_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    with contextlib.ExitStack() as stack:
        if workers == 0:
            windows = Windows(tokens, context_length)
        else:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ddl-tokens-"))) / "tokens.npy"
            np.save(path, tokens)
            windows = StoredWindows(path, context_length)
        # Shuffled and batched as indices, before any process is involved: no worker count and no start changes a batch.
        indices = (
            grain.MapDataset.range(len(windows)).shuffle(spread_seed).repeat().batch(batch_size, drop_remainder=True)
        )
        # No threads: the text lies in memory, and their buffer would be batches that nobody asked for.
        read_options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        dataset = (
            indices[start_step:].map(functools.partial(_rows, part=part)).map(windows).to_iter_dataset(read_options)
        )
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


def validation_batches(tokens: np.ndarray, context_length: int, batch_size: int, batches: int) -> list[Batch]:
    """The windows to evaluate on: always the same, spread evenly over the text.

    Args:
        tokens: (tokens,) integers, at least context_length + 1 of them.
        context_length: T, tokens of a sequence.
        batch_size: B, sequences of a batch.
        batches: how many at most; a short text gives fewer.

    Returns:
        Dicts as of `train_batches`, every window at most once. Where the windows do not fill the last batch, rows with
        targets -1 do.
    """
    windows = Windows(tokens, context_length)
    count = min(len(windows), batch_size * batches)
    evenly = np.arange(count) * len(windows) // count
    full = [windows(evenly[start : start + batch_size]) for start in range(0, count, batch_size)]
    missing = -count % batch_size
    last = full.pop()
    padding = ((0, missing), (0, 0))
    return [*full, {name: np.pad(last[name], padding, constant_values=value) for name, value in _PADDING.items()}]


def _rows(batch: np.ndarray, part: tuple[int, int]) -> np.ndarray:
    index, count = part
    size = len(batch) // count
    return batch[index * size : (index + 1) * size]


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
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # A parent that was killed cannot tell its workers, and they would wait for it forever.
    multiprocessing.parent_process().join()
    os._exit(1)
