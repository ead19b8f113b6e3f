"""Text to token shards: documents are read in order, encoded by many processes, and written in order.

What the shards hold depends on the documents alone, not on how many processes encode them, nor on when a run was
stopped and went on.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import hashlib
import time

import numpy as np

from ddl_jax.config.preparation import PreparationConfig
from ddl_jax.data.encoding import Encoded, Encoder, encoded
from ddl_jax.data.index import describe_tokenizer
from ddl_jax.data.output import OutputFolder, Progress, Read
from ddl_jax.data.sources import Chunk, Source, chunks, documents, find_sources
from ddl_jax.data.tokenizer import FILE_NAME, ByteTokenizer, Tokenizer, open_tokenizer
from ddl_jax.data.writer import ShardWriter
from ddl_jax.errors import InputError

RECORD_SECONDS = 10.0  # what a killed run does again
Report = Callable[[int, int, int, int], None]


def prepare_shards(config: PreparationConfig, stop: Callable[[], bool], report: Report) -> dict | None:
    """Prepares shards, or goes on where the same command was stopped.

    Args:
        config: valid.
        stop: whether to stop in good order.
        report: called with the bytes of all sources, those that were read, the tokens that the shards hold, and how
            many of them are new.

    Returns:
        The index (what index.json holds), or None if stopped.

    Raises:
        InputError: a source, the tokenizer or the folder cannot be used; what was recorded before stays.
        RunError: writing fails; what was recorded before stays.
    """
    sources = find_sources(config.sources, config.text_field)
    tokenizer = open_tokenizer(config.tokenizer, f"--tokenizer {config.tokenizer!r}")
    settings = {
        "tokenizer": describe_tokenizer(config.tokenizer, tokenizer),
        "text_field": config.text_field,
        "validation_fraction": config.validation_fraction,
        "shard_tokens": config.shard_tokens,
        "sources": [source.path for source in sources],
    }
    with OutputFolder(config.out) as folder:
        index = folder.index()
        if index is not None:
            folder.require_same(index | {"sources": [source["name"] for source in index["sources"]]}, settings)
            for source, recorded in zip(sources, index["sources"], strict=True):
                if source.size != recorded["bytes"]:
                    raise _changed(source, folder)
            folder.clear_journal()  # of a process that was killed in between
            return index
        progress = folder.journal(settings)
        if progress is None:
            folder.clear()
            progress = Progress()
        else:
            _require_unchanged(sources, progress, config.text_field, folder)
        if not isinstance(tokenizer, ByteTokenizer):
            folder.write(FILE_NAME, tokenizer.to_json())
        run = _Run(config, settings, folder, sources, progress)
        try:
            done = run.go(tokenizer, stop, report)
        except InputError as error:
            if not run.recorded:
                raise
            raise InputError(
                f"{error}; what was done before is kept, and the same command goes on from there"
            ) from None
        if not done:
            return None
        run.complete()
        return folder.index()


class _Run:
    """The work, from where it stands to its end."""

    def __init__(
        self,
        config: PreparationConfig,
        settings: dict,
        folder: OutputFolder,
        sources: list[Source],
        progress: Progress,
    ):
        self.config, self.settings, self.folder = config, settings, folder
        self.sources, self.progress = sources, progress
        self.writers: list[ShardWriter] = []
        self.dtype = "<u2" if settings["tokenizer"]["vocabulary"] <= 2**16 else "<u4"
        self.recorded = bool(progress.sources)

    def go(self, tokenizer: Tokenizer, stop: Callable[[], bool], report: Report) -> bool:
        """Whether all was read, and is recorded."""
        progress, total = self.progress, sum(source.size for source in self.sources)
        before = np.cumsum([0, *(source.size for source in self.sources)]).tolist()
        encoder = Encoder(tokenizer, self.dtype, self.config.text_field, self.config.validation_fraction)
        folder, written = self.folder.path, {"train": progress.train, "val": progress.val}
        with contextlib.ExitStack() as stack:
            for side in written:
                writer = ShardWriter(folder, side, self.dtype, self.config.shard_tokens, written[side])
                self.writers.append(stack.enter_context(contextlib.closing(writer)))
            results = stack.enter_context(encoded(encoder, self._chunks(), self.config.workers, folder, stop))
            last = time.monotonic()
            for result in results:
                shards = self._add(result)
                tokens = progress.train.all_tokens + progress.val.all_tokens
                report(total, before[result.source.index] + result.read, tokens, len(result.tokens))
                if shards or time.monotonic() - last > RECORD_SECONDS:
                    self._record()
                    last = time.monotonic()
                if stop():
                    break
            if stop():
                self._record()
                return False
            self._require_text()
            for writer in self.writers:
                writer.finish()
            self._record()
        return True

    def _require_text(self) -> None:
        empty, held_out = self.progress.empty_documents, self.progress.val.all_documents
        if not self.progress.train.all_documents:
            raise InputError(
                f"SOURCE {self.config.sources[0]!r} holds no text to train on: of {empty + held_out} documents {empty} "
                f"are empty and {held_out} are held out; name files with more text"
            )

    def _chunks(self) -> Iterator[Chunk]:
        begun = self.progress.sources
        rest, first = self.sources[max(len(begun) - 1, 0) :], begun[-1].items if begun else 0
        for source in rest:
            yield from chunks(source, self.config.text_field, first)
            first = 0

    def _add(self, result: Encoded) -> int:
        """Writes documents, and notes that they were read; how many shards that finished."""
        progress, before = self.progress, self._whole()
        for source in self.sources[len(progress.sources) : result.source.index + 1]:
            progress.sources.append(Read(source.path, source.size, source.modified))
        held_out = np.repeat(result.held_out, result.lengths)  # of tokens
        train, val = self.writers
        train.add(result.tokens[~held_out], result.lengths[~result.held_out])
        val.add(result.tokens[held_out], result.lengths[result.held_out])
        read = progress.sources[-1]
        read.items = result.end
        read.documents += len(result.digests)
        read.text_sha256 = chained(read.text_sha256, result.digests)
        progress.empty_documents += result.empty
        progress.text_bytes += result.text_bytes
        return self._whole() - before

    def _whole(self) -> int:
        return len(self.progress.train.shards) + len(self.progress.val.shards)

    def _record(self) -> None:
        for writer in self.writers:
            writer.sync()
        self.folder.record(self.settings, self.progress)
        self.recorded = True
        for writer in self.writers:
            writer.publish()

    def complete(self) -> None:
        """Writes the index."""
        progress = self.progress
        for source in self.sources[len(progress.sources) :]:  # that hold nothing
            progress.sources.append(Read(source.path, source.size, source.modified))
        sides = {"train": progress.train, "validation": progress.val}
        self.folder.complete(
            self.settings
            | {"sources": [read.result() for read in progress.sources]}
            | {f"{side}_tokens": written.all_tokens for side, written in sides.items()}
            | {f"{side}_documents": written.all_documents for side, written in sides.items()}
            | {"empty_documents": progress.empty_documents, "text_bytes": progress.text_bytes}
            | {"shards": [dataclasses.asdict(shard) for written in sides.values() for shard in written.shards]}
        )


def _require_unchanged(sources: list[Source], progress: Progress, field: str, folder: OutputFolder) -> None:
    """Checks that what was read is still there. The file that was being read may have been mended behind that place.

    Raises:
        InputError: it is not, or it cannot be read.
    """
    for source, read in zip(sources, progress.sources, strict=False):
        if (source.size, source.modified) == (read.bytes, read.modified):
            continue
        unfinished = source.index == len(progress.sources) - 1
        if _text_sha256(source, field, read.items if unfinished else None) != read.text_sha256:
            raise _changed(source, folder)
        read.bytes, read.modified = source.size, source.modified


def chained(before: str, digests: list[bytes]) -> str:
    """The digest of documents, in hex, from that of all before them: a running SHA-256 could not be written down."""
    value = bytes.fromhex(before)
    for digest in digests:
        value = hashlib.sha256(value + digest).digest()
    return value.hex()


def _text_sha256(source: Source, field: str, items: int | None) -> str:
    digest = ""
    for chunk in chunks(source, field):
        left = None if items is None else max(items - chunk.first, 0)
        chunk = dataclasses.replace(chunk, items=chunk.items[:left])
        found = [document.data for document in documents(chunk, field) if document.text.strip()]
        digest = chained(digest, [hashlib.sha256(data).digest() for data in found])
        if items is not None and chunk.end >= items:
            break
    return digest


def _changed(source: Source, folder: OutputFolder) -> InputError:
    return InputError(
        f"{source.path!r} is not what {folder.shown} was prepared from any more; restore it, or use another folder"
    )
