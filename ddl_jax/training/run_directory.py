"""The run directory: one configuration, one process at a time, metrics that agree with the checkpoints."""

import fcntl
import json
import os
from pathlib import Path
import tempfile

from ddl_jax.config import Config
from ddl_jax.config_files import dump_config, from_settings, load_file, resumed, typed_settings
from ddl_jax.errors import InputError, RunError


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
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "a")
        except OSError as error:
            raise InputError(f"run_dir {config.run_dir!r} cannot be written: {error.strerror}; use another run_dir") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise InputError(f"run_dir {config.run_dir!r} is in use by another process; use another run_dir, or wait") from None
        self._config_file = self.path / "config.yaml"
        self._metrics_file = self.path / "metrics.jsonl"

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if not self.begun:  # nothing half-written stays behind
            (self.path / ".lock").unlink(missing_ok=True)
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
            leftovers = [name for name in ("metrics.jsonl", "checkpoints") if (self.path / name).exists()]
            if leftovers:
                raise InputError(f"run_dir {config.run_dir!r} holds {leftovers[0]} but no config.yaml; use another run_dir")
            return config
        recorded = from_settings(typed_settings(load_file(self._config_file))).resolve()
        return resumed(recorded, config)

    def begin(self, config: Config, data: dict) -> None:
        """Records the configuration and what the data is; on resuming, checks that the data is still the same.

        Raises:
            InputError: the text or the tokenizer has changed since the run began.
        """
        data_file = self.path / "data.json"
        if self.begun and data_file.exists():
            recorded = json.loads(data_file.read_text())
            for name in ("text_sha256", "tokenizer_sha256"):
                if recorded[name] != data[name]:
                    raise InputError(
                        f"data.corpus {config.data.corpus!r} has another {name} than when the run in {self.path} began; "
                        "restore the text, or use another run_dir"
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
