"""What a study directory holds: see `ddl_jax.studies.design` for its layout. Nothing here trains or needs jax."""

from collections.abc import Mapping
import dataclasses
from pathlib import Path
from typing import Any, Literal

from ddl_jax.config import Config
from ddl_jax.config.files import from_settings, typed_settings
from ddl_jax.config.rules import plain, plain_path
from ddl_jax.config.study import Arm, Reading, StudyConfig
from ddl_jax.errors import InputError
from ddl_jax.studies.design import Cost, PlannedRun, final_loss, metrics
from ddl_jax.studies.folder import costs_of, read_json

State = Literal["finished", "diverged", "failed", "half-done", "not begun"]
REASON = 300  # characters of it that are kept
DIVERGED = 4  # the exit code of a training run whose loss or gradient is no longer finite


@dataclasses.dataclass(frozen=True)
class StudyRecord:
    """What was settled before a study's first run.

    Attributes:
        folder: of the study.
        study: what is compared.
        experiment: what the arms have in common, resolved.
        costs: of the arms measured so far, the reference arm among them.
        device: on which they were measured.
        initial: by arm, "loss" at initialisation, and for each of the "sublayers" the "relative_update" and the "gate"
            of its first update.
    """

    folder: Path
    study: StudyConfig
    experiment: Config
    costs: Mapping[str, Cost]
    device: str
    initial: Mapping[str, dict]

    @property
    def tokens_per_step(self) -> int:
        """The same for all arms."""
        return self.experiment.training.batch_size * self.experiment.model.context_length


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What has come of a planned run.

    Attributes:
        state: where it stands.
        step: the last one that was logged.
        loss: the validation loss after its last step, in nats per token; None unless it has finished.
        reason: what it said last, if it failed or diverged.
        curve: steps and the validation losses after them.
    """

    state: State
    step: int
    loss: float | None = None
    reason: str = ""
    curve: tuple[tuple[int, float], ...] = ()


def outcome(folder: Path, run: PlannedRun) -> Outcome:
    """What has come of a planned run.

    Args:
        folder: of the study.
        run: that may have begun or not.

    Raises:
        InputError: what is recorded of its failure is damaged.
    """
    directory = run.folder(folder)
    records = metrics(directory)
    evaluated = {record["step"]: record["validation_loss"] for record in records if "validation_loss" in record}
    curve = tuple(sorted(evaluated.items()))
    step = records[-1]["step"] if records else 0
    loss = final_loss(directory, run.steps)
    if loss is not None:
        return Outcome("finished", step, loss, curve=curve)
    failure = run.beside(folder, "failed.json")
    said = read_json(failure)
    if said is not None:
        try:
            code, message = said["exit_code"], " ".join(str(said["message"]).split())[:REASON]
        except (KeyError, TypeError) as error:
            reason = f"is damaged ({error} is missing); restore or remove it"
            raise InputError(f"{plain_path(failure)} {reason}") from None
        return Outcome("diverged" if code == DIVERGED else "failed", step, reason=message, curve=curve)
    return Outcome("half-done" if records else "not begun", step, curve=curve)


def read_record(folder: Path) -> StudyRecord:
    """What was settled before a study's first run.

    Args:
        folder: of the study.

    Raises:
        InputError: it holds no study, none that has been measured, or what it holds is damaged.
    """
    if not folder.is_dir():
        raise InputError(f"{plain_path(folder)} is not a folder; name a study's file, or the folder of its runs")
    settled, measured, initial = (read_json(folder / f"{name}.json") for name in ("study", "measured", "initial"))
    if settled is None:
        raise InputError(f"{plain_path(folder)} holds no study.json, so no study; `ddl study run` makes one")
    if measured is None:
        raise InputError(f"{plain_path(folder)}: nothing is measured yet, nothing has run; `ddl study run` does both")
    try:
        study = _study(settled["study"])
        experiment = from_settings(typed_settings(settled["experiment"])).resolve()
        costs = {arm: cost for arm, cost in costs_of(measured).items() if arm in study.arms}
        device = str(measured["device"])
        initial = {arm: _initial(found) for arm, found in (initial or {}).items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = str(error) if isinstance(error, InputError) else f"{type(error).__name__} {error}"
        raise InputError(
            f"{plain_path(folder)}: study.json, measured.json or initial.json is damaged ({plain(reason)}); restore it"
        ) from None
    if study.reference not in costs:
        raise InputError(f"{plain_path(folder)}: measured.json lacks the reference arm {study.reference}; restore it")
    return StudyRecord(folder, study, experiment, costs, device, initial)


def _study(tree: dict[str, Any]) -> StudyConfig:
    """The study that `dataclasses.asdict` has turned into plain dictionaries, and JSON its tuples into lists."""
    tree = {key: tuple(value) if isinstance(value, list) else value for key, value in tree.items()}
    arms = {name: Arm(**arm) for name, arm in tree["arms"].items()}
    study = StudyConfig(**tree | {"arms": arms, "readings": tuple(Reading(**reading) for reading in tree["readings"])})
    study.validate()
    return study


def _initial(tree: Mapping[str, Any]) -> dict:
    updates = [{name: update[name] for name in ("relative_update", "gate")} for update in tree["sublayers"]]
    return {"loss": tree["loss"], "sublayers": updates}
