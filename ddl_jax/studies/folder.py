"""The folder of a study: one process at a time, and settings that stay what they were (`design` has its layout)."""

from collections.abc import Iterator
import contextlib
import dataclasses
import fcntl
import json
from pathlib import Path
from typing import Any

from ddl_jax.atomic import write_atomically
from ddl_jax.config import Config
from ddl_jax.config.files import RESUMABLE, Settings, difference, dump_config, from_settings, load_file, overlay
from ddl_jax.config.rules import plain, plain_path, shown
from ddl_jax.config.study import StudyConfig
from ddl_jax.errors import InputError
from ddl_jax.studies.design import Cost
from ddl_jax.studies.schedule import Shared

LOCK = ".ddl-study"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Makes the folder and holds it for this process; raises InputError if it is another's or cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / LOCK, "a")  # noqa: SIM115, closed below
    except OSError as error:
        reason = "is not a folder" if isinstance(error, FileExistsError) else f"cannot be written: {error.strerror}"
        raise InputError(f"run_dir {plain_path(folder)!r} {reason}; use another --run_dir") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            message = "is in use by another process; use another --run_dir, or wait"
            raise InputError(f"run_dir {plain_path(folder)!r} {message}") from None
        yield


def shared_by_arms(experiment: Settings) -> Shared:
    """What the runs of all arms start from."""
    config = from_settings(experiment)
    return Shared(config.training.steps, config.optimizer.learning_rate)


def require_as_begun(folder: Path, study: StudyConfig, configs: dict[str, Config]) -> None:
    """Checks that the study is the one that was begun in the folder. Arms, seeds and readings may have been added.

    Args:
        folder: of the study, which may be new.
        study: as it is now.
        configs: those of its arms, as far as they are known.

    Raises:
        InputError: what the finished runs or the measured costs stand for has changed.
    """
    where = f"{plain_path(folder)} holds a study"
    recorded = read_json(folder / "study.json")
    if recorded is not None:
        before = recorded["study"]
        if before["reference"] != study.reference:
            was = f"another reference (was {before['reference']}, now {study.reference})"
            raise InputError(f"{where} with {was}; use another --run_dir")
        for name in before["arms"].keys() & study.arms.keys():
            old, new = before["arms"][name]["widened_to"], study.arms[name].widened_to
            if old != new:
                was = f"whose arm {name} was widened to {shown(old)}, now to {shown(new)}"
                raise InputError(f"{where} {was}; use another --run_dir, or name the arm anew")
    for arm, config in configs.items():
        file = folder / "arms" / f"{arm}.yaml"
        if not file.exists():
            continue
        old = from_settings(load_file(file)).resolve()
        changed = [change for change in difference(old, config) if change[0] not in RESUMABLE]
        if changed:
            key, was, now = changed[0]
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise InputError(
                f"{where} whose arm {arm} has another {key} (was {shown(was)}, now {shown(now)}){more}; use another "
                "--run_dir, or name the arm anew"
            )


def write_study(folder: Path, study: StudyConfig, experiment: Settings) -> None:
    """Writes study.json."""
    shared = shared_by_arms(experiment)
    settled = {"training": {"steps": shared.steps}, "optimizer": {"learning_rate": shared.learning_rate}}
    write_json(folder / "study.json", {"study": dataclasses.asdict(study), "experiment": overlay(experiment, settled)})


def write_arm(folder: Path, arm: str, config: Config) -> Path:
    """Writes the configuration of an arm; returns the file."""
    file = folder / "arms" / f"{arm}.yaml"
    file.parent.mkdir(exist_ok=True)
    write_atomically(file, dump_config(config))
    return file


def costs_of(measured: dict[str, Any]) -> dict[str, Cost]:
    """What measured.json says the arms cost."""
    names = [field.name for field in dataclasses.fields(Cost)]
    return {arm: Cost(**{name: cost[name] for name in names}) for arm, cost in measured["arms"].items()}


def read_json(path: Path) -> dict[str, Any] | None:
    """What a JSON file of the folder holds, or None where there is none yet; raises InputError if it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{plain_path(path)} cannot be read ({plain(str(error))}); restore it") from None


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file, whole or not at all."""
    write_atomically(path, json.dumps(value, indent=2, allow_nan=False) + "\n")
