"""The folder that shards are prepared in: one process at a time, and a journal to go on from."""

import contextlib
import dataclasses
import fcntl
import json
import os
from pathlib import Path

from ddl_jax.atomic import write_atomically
from ddl_jax.config.rules import plain_path, shown
from ddl_jax.data.index import FORMAT, INDEX, read_record
from ddl_jax.data.tokenizer import FILE_NAME
from ddl_jax.data.writer import PARTIAL, Shard, Written, writing
from ddl_jax.errors import InputError

LOCK = ".ddl-prepare"  # says that the folder is ours; held by the process that writes in it
JOURNAL = "progress.json"
_NOBODY_KNOWS = (LOCK, FILE_NAME)  # may be there before anything is recorded


@dataclasses.dataclass
class Read:
    """What was read of one source.

    Attributes:
        name: of the file.
        bytes: of the file.
        modified: when it was last changed, in nanoseconds.
        items: lines or rows that were read.
        documents: among them, those with text.
        text_sha256: of their text: each document's digest with that of all before it, hashed; in hex.
    """

    name: str
    bytes: int
    modified: int
    items: int = 0
    documents: int = 0
    text_sha256: str = ""

    def result(self) -> dict:
        """What an index says of it."""
        names = ("name", "bytes", "documents", "text_sha256")
        return {name: value for name, value in dataclasses.asdict(self).items() if name in names}


@dataclasses.dataclass
class Progress:
    """What was read and written so far.

    Attributes:
        sources: those begun, in order; all but the last are finished.
        train: training documents.
        val: documents held out.
        empty_documents: those of nothing but white space, which are left out.
        text_bytes: UTF-8 bytes of the others.
    """

    sources: list[Read] = dataclasses.field(default_factory=list)
    train: Written = dataclasses.field(default_factory=Written)
    val: Written = dataclasses.field(default_factory=Written)
    empty_documents: int = 0
    text_bytes: int = 0


class OutputFolder:
    """The folder, held for this process alone. For a `with` statement.

    What a start leaves behind that never came to record anything is cleared away.

    Args:
        path: need not exist.

    Raises:
        InputError: it cannot be written, another process writes in it, or it holds something else.
    """

    def __init__(self, path: str):
        self.path = Path(os.path.expanduser(path))
        self.shown = f"--out {path!r}"
        self._new_folders = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            there = sorted(os.listdir(self.path)) if self.path.exists() else []
            self._refuse_foreign(there)
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / LOCK, "a")  # noqa: SIM115, closed by __exit__
        except OSError as error:
            not_folder = isinstance(error, FileExistsError | NotADirectoryError)
            reason = "is not a folder" if not_folder else f"cannot be written: {error.strerror}"
            raise InputError(f"{self.shown} {reason}; use another folder") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise InputError(f"{self.shown} is in use by another process; use another folder, or wait") from None

    def _refuse_foreign(self, there: list[str]) -> None:
        if read_record(self.path / INDEX) or read_record(self.path / JOURNAL):
            return
        known = [name for name in there if LOCK in there and (name in _NOBODY_KNOWS or name.endswith(PARTIAL))]
        foreign = [name for name in there if name not in known]
        if foreign:
            raise InputError(f"{self.shown} holds {foreign[0]!r}, but no shards of ours; use a new or an empty folder")

    def __enter__(self) -> "OutputFolder":
        return self

    def __exit__(self, *_) -> None:
        if self.index() is None and not (self.path / JOURNAL).exists():
            self.clear()
            with contextlib.suppress(OSError):
                (self.path / LOCK).unlink(missing_ok=True)
                for folder in self._new_folders:
                    folder.rmdir()
        self._lock.close()

    def clear(self) -> None:
        """Removes what was never recorded."""
        for path in (self.path / FILE_NAME, *self.path.glob(f"*{PARTIAL}")):
            path.unlink(missing_ok=True)

    def index(self) -> dict | None:
        """The index, once all is done; raises InputError if it cannot be read."""
        return read_record(self.path / INDEX)

    def journal(self, settings: dict) -> Progress | None:
        """Where to go on, or None at the first start.

        Raises:
            InputError: the journal is of other settings, or damaged.
        """
        record = read_record(self.path / JOURNAL)
        if record is None:
            return None
        try:
            self.require_same(record["settings"], settings)
            progress = record["progress"]
            sides = {
                side: Written(**progress[side] | {"shards": [Shard(**shard) for shard in progress[side]["shards"]]})
                for side in ("train", "val")
            }
            return Progress(**progress | sides | {"sources": [Read(**source) for source in progress["sources"]]})
        except (KeyError, TypeError):
            raise InputError(f"{self.shown}: {JOURNAL} is damaged; remove the folder, and prepare again") from None

    def require_same(self, recorded: dict, settings: dict) -> None:
        """Raises InputError where the folder was prepared with other settings; says which."""
        changed = [name for name in settings if recorded[name] != settings[name]]
        if changed:
            name = changed[0]
            was, now = recorded[name], settings[name]
            if isinstance(now, dict):
                name, was, now = next((f"{name}'s {key}", was[key], now[key]) for key in now if was[key] != now[key])
            elif isinstance(now, list):
                first = next((pair for pair in zip(was, now, strict=False) if pair[0] != pair[1]), None)
                was, now = first or (f"{len(was)} files", f"{len(now)} files")
            was, now = (plain_path(repr(it)) if isinstance(it, str) else shown(it) for it in (was, now))
            raise InputError(
                f"{self.shown} was begun with another {name.replace('_', ' ')} (was {was}, now {now}); "
                "use another folder, or the recorded values"
            )

    def record(self, settings: dict, progress: Progress) -> None:
        """Writes the journal; raises RunError if that fails."""
        record = {"format": FORMAT, "settings": settings, "progress": dataclasses.asdict(progress)}
        self.write(JOURNAL, json.dumps(record, indent=1) + "\n")

    def complete(self, index: dict) -> None:
        """Writes the index, after which there is nothing to go on from; raises RunError if that fails."""
        self.write(INDEX, json.dumps({"format": FORMAT, **index}, indent=1) + "\n")
        self.clear_journal()

    def clear_journal(self) -> None:
        """Removes what only an unfinished preparation needs."""
        for path in (self.path / JOURNAL, *self.path.glob(f"*{PARTIAL}")):
            path.unlink(missing_ok=True)

    def write(self, name: str, text: str) -> None:
        """Writes a file that is never seen half-written; raises RunError if that fails."""
        with writing(self.path / name):
            write_atomically(self.path / name, text)
