"""Documents out of files: Parquet, JSON lines and plain text, in pieces that are handed to those who encode them.

What a file holds is decided by its name: `.parquet`; `.jsonl`, `.ndjson` or `.json` (an object a line); any other name
is text, the whole file a document. `.gz` or `.zst` may follow the latter two. A file is read from front to back and is
never in memory as a whole, unless it is a single document.
"""

from collections.abc import Iterable, Iterator
import contextlib
import dataclasses
import gzip
import io
import itertools
import json
import os
from typing import IO, Literal
import zlib

from ddl_jax.config.rules import plain
from ddl_jax.data.corpora import matching_files
from ddl_jax.data.extras import package_folder
from ddl_jax.errors import InputError

CHUNK_BYTES = 2**18  # of text in a chunk: some tenths of a second of a tokenizer's work
ROWS = 64  # of a Parquet file that are read at once
Kind = Literal["parquet", "jsonl", "text"]
_JSON_ENDINGS = (".jsonl", ".ndjson", ".json")


@dataclasses.dataclass(frozen=True)
class Source:
    """A file of documents.

    Attributes:
        index: its place among the sources.
        path: as it was found.
        size: in bytes.
        modified: when its content last changed, in nanoseconds.
    """

    index: int
    path: str
    size: int
    modified: int

    @property
    def compression(self) -> Literal["gz", "zst", ""]:
        ending = self.path.lower().rpartition(".")[2]
        return ending if ending in ("gz", "zst") else ""

    @property
    def kind(self) -> Kind:
        name = self.path.lower().removesuffix(f".{self.compression}")
        if name.endswith(".parquet") and not self.compression:
            return "parquet"
        return "jsonl" if name.endswith(_JSON_ENDINGS) else "text"


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Some documents of a source, one after another, as they stand in the file.

    Attributes:
        source: where they are from.
        first: number of the first item (line or row of the file, from 0).
        items: lines of JSON, or UTF-8 text; None for a row without text.
        read: bytes of the file that had been read.
        group: of a Parquet file, the row group they are all in, else 0.
        group_first: number of that row group's first row.
    """

    source: Source
    first: int
    items: list[bytes | None]
    read: int
    group: int = 0
    group_first: int = 0

    @property
    def end(self) -> int:
        """Number of the item that follows."""
        return self.first + len(self.items)

    def place(self, number: int) -> str:
        """Where item `number` stands, for an error."""
        inside = {
            "parquet": f", row group {self.group}, row {number - self.group_first}",
            "jsonl": f", line {number + 1}",
            "text": "",
        }
        return f"{self.source.path!r}{inside[self.source.kind]}"


@dataclasses.dataclass(frozen=True)
class Document:
    """One document: where it stands, its text, and the text as UTF-8."""

    place: str
    text: str
    data: bytes


def find_sources(patterns: Iterable[str], field: str) -> list[Source]:
    """The files that match, in the order of their names.

    Raises:
        InputError: a pattern matches no file, a file cannot be read, is a Parquet file without a column `field` of
            text or without an end, or a package is not installed.
    """
    sources = []
    paths = {os.path.normpath(path) for path in matching_files(patterns, "SOURCE")}  # ./a is a, and read once
    for index, path in enumerate(sorted(paths)):
        with _reading(path):
            status = os.stat(path)
            source = Source(index, path, status.st_size, status.st_mtime_ns)
            if source.kind == "parquet":
                _open_parquet(source, field).close()
            else:
                open(path, "rb").close()
        if source.compression and source.size == 0:
            raise InputError(f"{path!r} is cut short: it is empty; copy it again, or leave it out")
        sources.append(source)
    return sources


def chunks(source: Source, field: str, first: int = 0) -> Iterator[Chunk]:
    """The documents of a source, from item number `first` on, in chunks of about `CHUNK_BYTES`.

    Raises:
        InputError: the file is cut short or corrupt.
    """
    if source.kind == "parquet":
        yield from _parquet_chunks(source, field, first)
        return
    with contextlib.ExitStack() as stack:
        with _reading(source.path):
            raw = stack.enter_context(open(source.path, "rb"))
            stream = stack.enter_context(_decompressed(raw, source.compression))
            lines = iter(stream) if source.kind == "jsonl" else iter([stream.read()])
            rest = itertools.islice(lines, first, None)
        number = first
        while True:
            with _reading(source.path, f" after line {number}" if source.kind == "jsonl" else ""):
                items = _some(rest)
                chunk = Chunk(source, number, items, raw.tell())
            if not items:
                return
            yield chunk
            number = chunk.end


def _some(items_left: Iterator[bytes | None]) -> list[bytes | None]:
    items, size = [], 0
    for item in items_left:
        items.append(item)
        size += len(item or b"")
        if size >= CHUNK_BYTES:
            break
    return items


@contextlib.contextmanager
def _reading(path: str, place: str = "") -> Iterator[None]:
    """Errors of reading as one line that names the file."""
    try:
        yield
    except InputError:
        raise
    except OSError as error:
        if error.errno is not None:
            reason = os.strerror(error.errno)
            raise InputError(f"{path!r} cannot be read: {reason}; make it readable, or leave it out") from error
        raise _damaged(path, place, error) from error
    except (EOFError, ValueError, RuntimeError, zlib.error) as error:  # pyarrow's errors are of the middle two
        raise _damaged(path, place, error) from error


def _damaged(path: str, place: str, error: Exception) -> InputError:
    reason = plain(str(error)).rstrip(".")
    return InputError(f"{path!r} is cut short or corrupt{place} ({reason}); copy it again, or leave it out")


def _decompressed(raw: IO[bytes], compression: str) -> IO[bytes]:
    if compression == "gz":
        return gzip.GzipFile(fileobj=raw)
    if compression == "zst":
        return io.BufferedReader(_pyarrow(raw.name).CompressedInputStream(raw, "zstd"), 2**18)
    return raw


def _pyarrow(path: str):
    package_folder("pyarrow", f"{path!r}")
    import pyarrow

    return pyarrow


def _open_parquet(source: Source, field: str):
    """The file, once its end and its column have been looked at."""
    pyarrow = _pyarrow(source.path)
    from pyarrow import parquet

    # Pages are read one after another, not a row group at once; sums over pages are checked where there are any.
    file = parquet.ParquetFile(source.path, buffer_size=2**20, pre_buffer=False, page_checksum_verification=True)
    schema = file.schema_arrow
    if field not in schema.names:
        names = plain(", ".join(schema.names))
        raise InputError(f"{source.path!r} has no column {field!r}; it has: {names}; choose with --text-field")
    kind = schema.field(field).type
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if not any(is_text(kind) for is_text in (pyarrow.types.is_string, pyarrow.types.is_large_string)):
        raise InputError(f"{source.path!r}: column {field!r} is {plain(str(kind))}, not text; choose with --text-field")
    return file


def _parquet_chunks(source: Source, field: str, first: int) -> Iterator[Chunk]:
    with _reading(source.path):
        file = _open_parquet(source, field)
    with file:
        begin = 0
        for group in range(file.num_row_groups):
            end = begin + file.metadata.row_group(group).num_rows
            if end > first:
                rest = itertools.islice(_rows(file, field, source.path, group), max(first - begin, 0), None)
                number = max(first, begin)
                while items := _some(rest):
                    read = source.size * (number + len(items)) // file.metadata.num_rows
                    yield Chunk(source, number, items, read, group, begin)
                    number += len(items)
                if number < end:
                    raise _damaged(source.path, f" in row group {group}", EOFError(f"{end - number} rows are missing"))
            begin = end


def _rows(file, field: str, path: str, group: int) -> Iterator[bytes | None]:
    """The texts of a row group. Not decoded: bytes are quicker to hand over, and whoever decodes them knows the row."""
    import pyarrow

    batches = None
    while True:
        with _reading(path, f" in row group {group}"):
            if batches is None:
                batches = file.iter_batches(ROWS, row_groups=[group], columns=[field], use_threads=False)
            batch = next(batches, None)
            if batch is None:
                return
            items = batch.column(0).cast(pyarrow.string()).cast(pyarrow.binary()).to_pylist()
        yield from items


def documents(chunk: Chunk, field: str) -> Iterator[Document]:
    """The documents of a chunk, those of nothing but white space too; blank lines of JSON are none.

    Raises:
        InputError: a line is no JSON object with text in `field`, or text is not UTF-8.
    """
    for number, item in enumerate(chunk.items, chunk.first):
        if chunk.source.kind == "jsonl" and not item.strip():
            continue
        place = chunk.place(number)
        try:
            if item is None:
                raise InputError(f"{place} has no text in column {field!r} (null); leave the row out")
            text = item.decode("utf-8-sig" if chunk.source.kind == "jsonl" and number == 0 else "utf-8")
            if chunk.source.kind == "jsonl":
                text = _json_text(text, field, place)
                item = text.encode("utf-8")
        except UnicodeDecodeError as error:
            wrong = f"byte {error.start} is 0x{error.object[error.start]:02x}"
            raise InputError(f"{place} is not UTF-8 ({wrong}); convert it, or leave it out") from None
        except UnicodeEncodeError as error:
            raise InputError(
                f"{place}: the text has half a character (a lone surrogate) at position {error.start}; leave it out"
            ) from None
        yield Document(place, text, item)


def _json_text(line: str, field: str, place: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{place} is not JSON ({error.msg}, column {error.colno}); repair or remove it") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place} is not JSON that can be read ({plain(str(error))}); remove it") from None
    if not isinstance(record, dict):
        raise InputError(f"{place} is not a JSON object but {plain(line)}; each line must be one with {field!r}")
    if field not in record:
        names = plain(", ".join(record)) or "nothing"
        raise InputError(f"{place} has no field {field!r}; it has: {names}; choose with --text-field")
    if not isinstance(record[field], str):
        found = plain(json.dumps(record[field]))
        raise InputError(f"{place}: field {field!r} is {found}, not text; choose with --text-field, or remove the line")
    return record[field]
