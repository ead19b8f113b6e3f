"""The run directory: one configuration, one process at a time, metrics that agree with the checkpoints."""

import dataclasses
import fcntl
import hashlib
import json
import os
from pathlib import Path

from ddl_jax.atomic import write_atomically
from ddl_jax.config import Config
from ddl_jax.config.files import NEWER, dump_config, fields, from_settings, load_file, resumed
from ddl_jax.data import Corpus
from ddl_jax.errors import InputError, RunError

LOCK = ".ddl-run"  # says that the folder is ours; held by the process that trains in it
BEFORE_THE_FIRST_STEP = ("config.yaml", "data.json", "tokenizer.json")
AFTERWARDS = ("metrics.jsonl", "checkpoints")


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        raise RunError(f"writing {path} failed: {error.strerror}") from error


def recorded_config(path: Path, shown: str) -> Config:
    """The configuration of a run that has begun.

    Args:
        path: of its folder.
        shown: what named the folder, as an error shows it.

    Raises:
        InputError: it is damaged.
    """
    settings = load_file(path / "config.yaml")
    for key, _, _ in fields():
        if key in NEWER:
            continue
        value = settings
        for name in key.split("."):
            if not isinstance(value, dict) or name not in value:
                raise InputError(f"{shown}: config.yaml lacks {key}; restore it, or use another run_dir")
            value = value[name]
    return from_settings(settings).resolve()


def _with_open_questions(recorded: Config, requested: Config) -> Config:
    """What is requested, but for what a converted model has settled: itself and its tokenizer."""
    names = ("compute_dtype", "state_dtype", "attention")
    model = dataclasses.replace(recorded.model, **{name: getattr(requested.model, name) for name in names})
    tokenizer = {name: getattr(recorded.data, name) for name in ("tokenizer", "vocabulary")}
    return dataclasses.replace(requested, model=model, data=dataclasses.replace(requested.data, **tokenizer))


class RunFolder:
    """The folder of a run, to look into: all that a process has of it that is not the one that writes.

    Args:
        config: resolved.
    """

    writes = False

    def __init__(self, config: Config):
        self.path = Path(os.path.expanduser(config.run_dir))
        self._shown = f"run_dir {config.run_dir!r}"

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, kind, error, trace) -> None:
        pass

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints, which may not exist yet."""
        return self.path / "checkpoints"

    @property
    def begun(self) -> bool:
        """Whether a run has come to its first step here."""
        progress = (self.path / "metrics.jsonl").exists() or any(self.path.glob("checkpoints/*"))
        return progress and (self.path / "config.yaml").exists()

    @property
    def converted(self) -> bool:
        """Whether this is a model from elsewhere (`ddl_jax.interop`) that has not been trained here yet."""
        return self.begun and not any((self.path / name).exists() for name in ("data.json", "metrics.jsonl"))

    def settle(self, config: Config) -> Config:
        """The configuration to go on with: `config`, or where a run has begun, its own with what may change changed.

        Raises:
            InputError: a run has begun here with another configuration, or what it recorded is damaged.
        """
        if not self.begun:
            return config
        if self.checkpoints.exists() and not self.checkpoints.is_dir():
            raise InputError(f"{self._shown}: checkpoints is not a folder; restore it, or use another run_dir")
        recorded = recorded_config(self.path, self._shown)
        return resumed(_with_open_questions(recorded, config) if self.converted else recorded, config)

    def begin(self, config: Config, corpus: Corpus) -> None:
        """Checks that the data is what was recorded.

        Raises:
            InputError: the text or the tokenizer is another, or the record is damaged.
        """
        data = self._describe(config, corpus)
        try:
            recorded = json.loads((self.path / "data.json").read_text(encoding="utf-8"))
            changed = [name for name in data if recorded[name] != data[name]]
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(
                f"{self._shown}: data.json is missing or damaged; restore it, or use another run_dir"
            ) from None
        if changed:
            name = changed[0]
            raise InputError(
                f"data.corpus {config.data.corpus!r} has another {name} ({data[name]}) than when the run in "
                f"{self.path} began ({recorded[name]}); restore it, or use another run_dir"
            )

    def _describe(self, config: Config, corpus: Corpus) -> dict:
        file = self.path / "tokenizer.json"
        tokenizer = hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else None
        return {
            **corpus.record(),
            "tokenizer": config.data.tokenizer,
            "tokenizer_sha256": tokenizer,
        }

    def keep_metrics_up_to(self, step: int) -> int:
        """How many lines of later steps were taken out of metrics.jsonl: none by a process that does not write."""
        return 0

    def log(self, record: dict) -> None:
        """Leaves it to the process that writes."""


class RunDirectory(RunFolder):
    """The folder of a run, held for this process alone. For a `with` statement.

    What a start leaves behind that never came to its first step is cleared away; a folder that is not ours stays as it
    is.

    Args:
        config: resolved.

    Raises:
        InputError: the folder cannot be written, another process trains in it, or it holds something else.
    """

    writes = True

    def __init__(self, config: Config):
        super().__init__(config)
        try:
            ours = (self.path / LOCK).exists()
            foreign = [name for name in (*BEFORE_THE_FIRST_STEP, *AFTERWARDS) if (self.path / name).exists()]
            if foreign and not ours and not self.begun:
                raise InputError(f"{self._shown} holds {foreign[0]}, but is no run of ours; use another run_dir")
            self._new_folders = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / LOCK, "a")  # noqa: SIM115, closed by __exit__
        except OSError as error:
            reason = "is not a folder" if isinstance(error, FileExistsError) else f"cannot be written: {error.strerror}"
            raise InputError(f"{self._shown} {reason}; use another run_dir") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise InputError(f"{self._shown} is in use by another process; use another run_dir, or wait") from None
        self._clear_leftovers()

    def __exit__(self, kind, error, trace) -> None:
        self._clear_leftovers()
        if not self.begun:
            (self.path / LOCK).unlink(missing_ok=True)
            for folder in self._new_folders:
                if not any(folder.iterdir()):
                    folder.rmdir()
        self._lock.close()

    def _clear_leftovers(self) -> None:
        for name in (*BEFORE_THE_FIRST_STEP, "metrics.jsonl"):
            for partial in self.path.glob(f"{name}.*.partial"):
                partial.unlink()
        if not self.begun:
            for name in BEFORE_THE_FIRST_STEP:
                (self.path / name).unlink(missing_ok=True)
            if self.checkpoints.is_dir():
                self.checkpoints.rmdir()

    def begin(self, config: Config, corpus: Corpus) -> None:
        """Records the configuration and what the data is; on resuming, checks that the data is still the same."""
        if self.begun and not self.converted:
            super().begin(config, corpus)
        else:
            _write(self.path / "data.json", json.dumps(self._describe(config, corpus), indent=2) + "\n")
        _write(self.path / "config.yaml", dump_config(config))

    def keep_metrics_up_to(self, step: int) -> int:
        """Takes the lines of later steps out of metrics.jsonl: those steps will be done again.

        Nothing is thrown away but a last line that a crash cut short: the lines go to metrics_redone.jsonl.

        Returns:
            How many lines were taken out.
        """
        file = self.path / "metrics.jsonl"
        if not file.exists():
            return 0
        kept, redone = [], []
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
            (kept if _step(line) <= step else redone).append(line)
        if redone and not redone[-1].endswith("\n"):
            redone.pop()
        if redone:
            with open(self.path / "metrics_redone.jsonl", "a", encoding="utf-8") as others:
                others.writelines(redone)
        _write(file, "".join(kept))
        return len(redone)

    def log(self, record: dict) -> None:
        """Appends one line to metrics.jsonl; raises RunError if it cannot be written."""
        file = self.path / "metrics.jsonl"
        try:
            with open(file, "a", encoding="utf-8") as lines:
                lines.write(json.dumps(record, allow_nan=False) + "\n")
        except OSError as error:
            raise RunError(f"writing {file} failed: {error.strerror}") from error


def _step(line: str) -> float:
    """The step of a line of metrics; of a line that is none, infinity."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
