"""Documents to tokens, in this process or in many, always in the order of the documents."""

import collections
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
import contextlib
import dataclasses
import hashlib
import multiprocessing
import os
from pathlib import Path
import signal

import numpy as np

from ddl_jax.config.rules import plain
from ddl_jax.data.sources import Chunk, Source, documents
from ddl_jax.data.tokenizer import FILE_NAME, ByteTokenizer, Tokenizer, open_tokenizer
from ddl_jax.data.workers import end_with_parent
from ddl_jax.errors import InputError, RunError

AHEAD = 4  # chunks of each worker that are read or encoded before their turn to be written


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A chunk of documents as tokens.

    Attributes:
        source: where they are from.
        end: number of the item that follows.
        read: bytes of the file that had been read.
        tokens: (tokens,), the separator before each document.
        lengths: (documents,) int64, tokens of each with its separator.
        held_out: (documents,) bool.
        digests: SHA-256 of the text of each.
        empty: how many documents were left out.
        text_bytes: UTF-8 bytes of the others.
    """

    source: Source
    end: int
    read: int
    tokens: np.ndarray
    lengths: np.ndarray
    held_out: np.ndarray
    digests: list[bytes]
    empty: int
    text_bytes: int


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Chunks to tokens.

    Attributes:
        tokenizer: of the documents.
        dtype: of a token.
        field: of the text, where a source has fields.
        validation_fraction: share of documents to hold out.
    """

    tokenizer: Tokenizer
    dtype: str
    field: str
    validation_fraction: float

    def __call__(self, chunk: Chunk) -> Encoded:
        """Encodes a chunk; raises InputError if a document cannot be read."""
        separator = np.array([self.tokenizer.separator], self.dtype)
        parts, lengths, digests, empty, text_bytes = [np.empty(0, self.dtype)], [], [], 0, 0
        for document in documents(chunk, self.field):
            if not document.text.strip():
                empty += 1
                continue
            tokens = self._encode(document.text, document.place)
            # Before each document, as in the published shards: its first token is predicted from there, and a shard
            # begins as a prompt does.
            parts += [separator, tokens.astype(self.dtype)]
            lengths.append(1 + len(tokens))
            digests.append(hashlib.sha256(document.data).digest())
            text_bytes += len(document.data)
        return Encoded(
            source=chunk.source,
            end=chunk.end,
            read=chunk.read,
            tokens=np.concatenate(parts),
            lengths=np.array(lengths, np.int64),
            held_out=np.array([is_held_out(digest, self.validation_fraction) for digest in digests], bool),
            digests=digests,
            empty=empty,
            text_bytes=text_bytes,
        )

    def _encode(self, text: str, place: str) -> np.ndarray:
        try:
            return self.tokenizer.encode(text)
        except Exception as error:
            if type(error) is not Exception:  # the library raises nothing more specific
                raise
            raise InputError(f"{place} cannot be encoded by --tokenizer: {plain(str(error))}") from None


def is_held_out(digest: bytes, validation_fraction: float) -> bool:
    """Whether a document is for validation: by the SHA-256 of its text, whatever other documents there are."""
    return int.from_bytes(digest[:8], "big") < validation_fraction * 2**64


@contextlib.contextmanager
def encoded(
    encoder: Encoder, work: Iterator[Chunk], workers: int, folder: Path, stop: Callable[[], bool]
) -> Iterator[Iterator[Encoded]]:
    """The chunks encoded, in their order. For a `with` statement, after which the workers have ended."""
    if workers == 0:
        yield map(encoder, work)
        return
    # The library's tokenizers do not survive a pickle whole: each worker reads the file.
    tokenizer = "bytes" if isinstance(encoder.tokenizer, ByteTokenizer) else str(folder / FILE_NAME)
    settings = (tokenizer, encoder.dtype, encoder.field, encoder.validation_fraction)
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin_worker, settings)
    # Ctrl-C reaches the workers, too, from their very start: when to stop is the parent's decision. They inherit this.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for _ in range(workers):
            pool.submit(int)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        yield _in_order(pool, work, AHEAD * workers, stop)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        pool.shutdown(cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, work: Iterator[Chunk], most: int, stop: Callable[[], bool]
) -> Iterator[Encoded]:
    """The results in the order of the work, of which at most so much is under way: memory does not grow."""
    pending: collections.deque[Future] = collections.deque()
    try:
        for future in _submitted(pool, work):
            pending.append(future)
            if len(pending) > most:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        if stop():  # a scheduler's SIGTERM has reached the workers as well
            return
        raise RunError(
            "a process that encodes was killed, perhaps for lack of memory; the same command goes on, with fewer "
            "--workers if need be"
        ) from None


def _submitted(pool: ProcessPoolExecutor, work: Iterator[Chunk]) -> Iterator[Future]:
    try:
        for chunk in work:
            yield pool.submit(_encode, chunk)
    except InputError as error:  # takes its turn: which error is said does not depend on the number of workers
        failed: Future = Future()
        failed.set_exception(error)
        yield failed


_encoder: Encoder  # of a worker


def _begin_worker(tokenizer: str, dtype: str, field: str, validation_fraction: float) -> None:
    """Runs first in a worker."""
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are parallel already
    end_with_parent()
    _encoder = Encoder(open_tokenizer(tokenizer, "--tokenizer"), dtype, field, validation_fraction)


def _encode(chunk: Chunk) -> Encoded:
    return _encoder(chunk)
