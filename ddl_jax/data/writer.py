"""Shards as they are written: tokens in llm.c's .bin layout, and beside each the places where its documents begin.

A shard has a temporary name until it is whole and recorded. What was written but not recorded when the process ended
is cut off again on the next start, so that a run that was killed goes on as if nothing had happened.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Literal

import numpy as np

from ddl_jax.data.shards import DTYPES, HEADER_BYTES, MAGIC
from ddl_jax.errors import InputError, RunError

PARTIAL = ".partial"
Side = Literal["train", "val"]


@dataclasses.dataclass(frozen=True)
class Shard:
    """A whole shard.

    Attributes:
        name: of its file; `val` in it has training hold it out.
        tokens: how many it holds.
        documents: likewise.
        documents_file: name of an .npy file, (documents + 1,) int64: where each document begins, with its separator,
            in tokens from the first; then the number of tokens.
        sha256: of the file of tokens, in hex.
    """

    name: str
    tokens: int
    documents: int
    documents_file: str
    sha256: str


@dataclasses.dataclass
class Written:
    """What one side holds: whole shards, and the tokens and documents of the one being written."""

    shards: list[Shard] = dataclasses.field(default_factory=list)
    tokens: int = 0
    documents: int = 0

    @property
    def all_tokens(self) -> int:
        return self.tokens + sum(shard.tokens for shard in self.shards)

    @property
    def all_documents(self) -> int:
        return self.documents + sum(shard.documents for shard in self.shards)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Errors of writing as one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"writing {path} failed: {reason}; the same command goes on once that is mended") from error


class _GrowingFile:
    """A file that grows at its end, from a given size on: a new one of zeros, or one that is cut off there."""

    def __init__(self, path: Path, size: int, new: bool):
        self.path = path
        with writing(path), contextlib.ExitStack() as stack:
            self._file = stack.enter_context(open(path, "ab", buffering=0))
            if not new and os.path.getsize(path) < size:
                raise InputError(f"{str(path)!r} is shorter than recorded; remove its folder, and prepare again")
            self._file.truncate(size)
            stack.pop_all()  # open from here on

    def append(self, data: bytes | np.ndarray) -> None:
        rest = memoryview(data).cast("B")
        with writing(self.path):
            while rest:
                rest = rest[self._file.write(rest) :]

    def sync(self) -> None:
        with writing(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class ShardWriter:
    """Writes the shards of one side.

    Args:
        folder: where.
        side: `train` or `val`.
        dtype: of a token, one of `DTYPES`.
        shard_tokens: a shard ends before the document that would make it longer; a longer document is one alone.
        written: what the folder holds; goes on behind that, and is kept up to date here.

    Raises:
        RunError: (all methods) writing fails.
        InputError: less is there than `written` says.
    """

    def __init__(self, folder: Path, side: Side, dtype: str, shard_tokens: int, written: Written):
        self.folder, self.side, self.dtype, self.shard_tokens, self.written = folder, side, dtype, shard_tokens, written
        self._published = 0
        self.publish()  # what a process that was killed did not come to
        self._open()

    @property
    def _stem(self) -> str:
        return f"tokens_{self.side}_{len(self.written.shards):06d}"

    def _open(self) -> None:
        now, new = self.written, self.written.documents == 0
        size = HEADER_BYTES + now.tokens * np.dtype(self.dtype).itemsize  # the header's numbers are not known yet
        with contextlib.ExitStack() as stack:
            self._tokens = _GrowingFile(self.folder / f"{self._stem}.bin{PARTIAL}", size, new)
            stack.callback(self._tokens.close)
            self._lengths = _GrowingFile(self.folder / f"{self._stem}.lengths{PARTIAL}", 8 * now.documents, new)
            stack.pop_all()

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Appends documents.

        Args:
            tokens: (tokens,) of all of them, one after another.
            lengths: (documents,) int64, tokens of each.
        """
        ends = np.cumsum(lengths)
        while len(lengths):
            begin = ends[0] - lengths[0]
            room = self.shard_tokens - self.written.tokens
            fitting = int(np.searchsorted(ends - begin, room, side="right"))
            if fitting == 0 and self.written.documents == 0:
                fitting = 1
            if fitting:
                taken = tokens[begin : ends[fitting - 1]]
                self._tokens.append(np.ascontiguousarray(taken, self.dtype))
                self._lengths.append(np.ascontiguousarray(lengths[:fitting], "<i8"))
                self.written.tokens += len(taken)
                self.written.documents += fitting
                ends, lengths = ends[fitting:], lengths[fitting:]
            if len(lengths):
                self.finish()

    def finish(self) -> None:
        """Makes a whole shard of what was written since the last one, if there is anything. It has its name only once
        `publish` is called, after it was recorded."""
        now = self.written
        if now.documents == 0:
            return
        self.sync()
        self.close()
        name, documents = f"{self._stem}.bin", f"{self._stem}.documents.npy"
        partial, lengths = self._tokens.path, self._lengths.path
        version = {dtype: number for number, dtype in DTYPES.items()}[self.dtype]
        with writing(partial):
            with open(partial, "r+b") as file:
                file.write(np.array([MAGIC, version, now.tokens], "<i4").tobytes())
                file.flush()
                os.fsync(file.fileno())
                file.seek(0)
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            with open(self.folder / f"{documents}{PARTIAL}", "wb") as file:
                np.save(file, np.concatenate([np.zeros(1, "<i8"), np.cumsum(np.fromfile(lengths, "<i8"))]))
                file.flush()
                os.fsync(file.fileno())
        self.written.shards.append(Shard(name, now.tokens, now.documents, documents, sha256))
        now.tokens = now.documents = 0
        self._open()

    def sync(self) -> None:
        """Waits until all that was written is on the disk."""
        self._tokens.sync()
        self._lengths.sync()

    def publish(self) -> None:
        """Gives the shards their names that are whole and were recorded since the last call."""
        for shard in self.written.shards[self._published :]:
            for name in (shard.documents_file, shard.name):
                with writing(self.folder / name):
                    if (self.folder / f"{name}{PARTIAL}").exists():
                        os.replace(self.folder / f"{name}{PARTIAL}", self.folder / name)
                if not (self.folder / name).exists():
                    raise InputError(f"{str(self.folder / name)!r} is missing; restore it, or use another --out")
            # Needed until here: a process killed before the shard was recorded begins its end again.
            (self.folder / f"{shard.name.removesuffix('.bin')}.lengths{PARTIAL}").unlink(missing_ok=True)
        self._published = len(self.written.shards)

    def close(self) -> None:
        """Closes the files."""
        self._tokens.close()
        self._lengths.close()
