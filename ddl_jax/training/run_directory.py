"""The run directory: one configuration, one process at a time, metrics that agree with the checkpoints."""

import fcntl
import hashlib
import json
import os
from pathlib import Path
import tempfile

from ddl_jax.config import Config
from ddl_jax.config_files import dump_config, from_settings, load_file, resumed, typed_settings
from ddl_jax.data import Corpus
from ddl_jax.errors import InputError, RunError

WRITTEN = ("tokenizer.json", "data.json")  # before config.yaml, which marks a run as begun


def write_atomically(path: Path, text: str) -> None:
    """Writes a file so that it is there whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class RunDirectory:
    """The folder of a run, held for this process alone. For a `with` statement.

    Args:
        config: resolved.

    Raises:
        InputError: the folder cannot be written, another process trains in it, or it holds something else.
    """

    def __init__(self, config: Config):
        self.path = Path(config.run_dir).expanduser()
        self._created = not self.path.exists()
        shown = f"run_dir {config.run_dir!r}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "a")  # noqa: SIM115, closed by __exit__
        except OSError as error:
            raise InputError(f"{shown} cannot be written: {error.strerror}; use another run_dir") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise InputError(f"{shown} is in use by another process; use another run_dir, or wait") from None
        self._config_file = self.path / "config.yaml"
        self._metrics_file = self.path / "metrics.jsonl"
        foreign = [name for name in (*WRITTEN, "metrics.jsonl", "checkpoints") if (self.path / name).exists()]
        if foreign and not self.begun:
            self._lock.close()
            raise InputError(f"{shown} holds {foreign[0]} but no config.yaml, so no run of ours; use another run_dir")

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if not self.begun:  # nothing half-written stays behind
            for name in (".lock", *WRITTEN):
                (self.path / name).unlink(missing_ok=True)
            if self._created and not any(self.path.iterdir()):
                self.path.rmdir()
        self._lock.close()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def begun(self) -> bool:
        """Whether a run has started here."""
        return self._config_file.exists()

    def settle(self, config: Config) -> Config:
        """The configuration to go on with: `config`, or where a run has begun, its own with what may change changed.

        Raises:
            InputError: a run has begun here with another configuration.
        """
        if not self.begun:
            return config
        recorded = from_settings(typed_settings(load_file(self._config_file))).resolve()
        return resumed(recorded, config)

    def begin(self, config: Config, corpus: Corpus) -> None:
        """Records the configuration and what the data is; on resuming, checks that the data is still the same.

        Raises:
            InputError: the text or the tokenizer has changed since the run began.
        """
        data_file, tokenizer_file = self.path / "data.json", self.path / "tokenizer.json"
        data = {
            "text_sha256": corpus.text_hash,
            "train_documents": corpus.train_documents,
            "train_tokens": len(corpus.train),
            "validation_documents": corpus.validation_documents,
            "validation_tokens": len(corpus.validation),
            "tokenizer": config.data.tokenizer,
            "tokenizer_sha256": _sha256(tokenizer_file) if tokenizer_file.exists() else None,
        }
        if self.begun:
            recorded = json.loads(data_file.read_text())
            for name, value in data.items():
                if recorded[name] != value:
                    raise InputError(
                        f"data.corpus {config.data.corpus!r} has another {name} ({value}) than when the run in "
                        f"{self.path} began ({recorded[name]}); restore it, or use another run_dir"
                    )
        else:
            write_atomically(data_file, json.dumps(data, indent=2) + "\n")
        write_atomically(self._config_file, dump_config(config))

    def keep_metrics_up_to(self, step: int) -> None:
        """Drops the lines of steps that will be done again, and a last line that a crash cut short."""
        if not self._metrics_file.exists():
            return
        kept = []
        for line in self._metrics_file.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if record["step"] <= step:
                kept.append(line + "\n")
        write_atomically(self._metrics_file, "".join(kept))

    def log(self, record: dict) -> None:
        """Appends one line to metrics.jsonl; raises RunError if it cannot be written."""
        try:
            with open(self._metrics_file, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise RunError(f"writing {self._metrics_file} failed: {error.strerror}") from error
