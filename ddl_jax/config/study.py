"""The settings of a study: arms that differ in a few settings of an experiment, compared seed by seed."""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import os
from pathlib import Path
import re
from typing import Any, Literal

from ddl_jax.config.experiment import Config
from ddl_jax.config.files import (
    Settings,
    from_settings,
    load_file,
    overlay,
    read_yaml,
    similar_names,
    typed_section,
    typed_settings,
)
from ddl_jax.config.rules import plain, plain_path, require, require_least, shown
from ddl_jax.errors import InputError

Budget = Literal["tokens", "flops", "seconds"]
LearningRate = Literal["matched", "tuned"]

# What all arms have in common, or the comparison would not be one of pairs; and what the study sets for every run.
SHARED = ("seed", "run_dir", "data", "model.vocab_size", "model.context_length", "training.steps",
          "training.batch_size", "training.evaluation_batches", "optimizer.learning_rate", "distributed")  # fmt: skip
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")  # of an arm: a folder's, and a column's


@dataclasses.dataclass(frozen=True)
class Arm:
    """One of the things that are compared.

    Attributes:
        settings: in which it differs from the study's experiment, as in a configuration file.
        widened_to: if given, `model.width` is raised until a training step takes as long as one of this other arm.
    """

    settings: Settings
    widened_to: str | None = None


@dataclasses.dataclass(frozen=True)
class Reading:
    """One way to compare the arms. Every run has a complete schedule of its own.

    Attributes:
        budget: what the arms are given the same of: `tokens`, `flops` or `seconds`, as much as the reference arm uses
            in `training.steps`.
        seeds: over how many of the study's seeds, the first ones.
        learning_rate: `matched` is the experiment's for every arm, `tuned` each arm's best.
    """

    budget: Budget
    seeds: int
    learning_rate: LearningRate = "matched"

    @property
    def name(self) -> str:
        """As in "equal tokens, tuned learning rates"."""
        tuned = ", tuned learning rates" if self.learning_rate == "tuned" else ""
        return f"equal {'FLOPs' if self.budget == 'flops' else self.budget}{tuned}"


@dataclasses.dataclass(frozen=True)
class StudyConfig:
    """A study.

    Attributes:
        question: what it asks, in a sentence.
        run_dir: folder of all its runs.
        experiments: names and files of configurations, any of which may be what the arms have in common; the first one
            is unless another is asked for.
        baseline: the arm that the others are compared with, and whose seeds give the noise.
        reference: the arm whose training.steps are the budgets.
        arms: names and what each is.
        differences: pairs of arms "A - B" to look at besides every arm minus the baseline.
        seeds: of parameters and data order.
        readings: see `Reading`.
        learning_rate_factors: times the experiment's learning rate, what `tuned` chooses from.
        tuning_seeds: with which it chooses; none of `seeds`.
    """

    question: str
    run_dir: str
    experiments: Mapping[str, str]
    baseline: str
    reference: str
    arms: Mapping[str, Arm]
    readings: tuple[Reading, ...]
    differences: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    learning_rate_factors: tuple[float, ...] = (0.5, 1.0, 2.0)
    tuning_seeds: tuple[int, ...] = (1000,)

    def pairs(self) -> list[tuple[str, str]]:
        """The arms (A, B) of every difference A − B to look at."""
        named = [tuple(text.split(" - ")) for text in self.differences]
        return named + [
            (arm, self.baseline) for arm in self.arms if arm != self.baseline if (arm, self.baseline) not in named
        ]

    def validate(self) -> None:
        """Raises InputError on a broken rule."""
        for name in ("question", "run_dir"):
            require(self, "", name, bool(getattr(self, name).strip()), "must not be empty")
        _require(bool(self.experiments), "experiments must name a configuration file, e.g. laptop: laptop.yaml")
        _require(len(self.arms) > 1, "arms must hold at least two arms")
        for kind, names in (("experiments", self.experiments), ("arms", self.arms)):
            for name in names:
                _require(bool(NAME.fullmatch(name)), f"{kind}.{plain(name)}: a name has letters, digits, '_' and '-'")
        for name in ("baseline", "reference"):
            self._require_arm(name, getattr(self, name))
        for text in self.differences:
            first, _, second = text.partition(" - ")
            _require(bool(second), f"differences: {shown(text)} must be two arms, e.g. 'delta - write_only'")
            self._require_arm("differences", first)
            self._require_arm("differences", second)
            _require(first != second, f"differences: {shown(text)} is one arm, twice")
        for name, arm in self.arms.items():
            if arm.widened_to is not None:
                self._require_arm(f"arms.{name}.widened_to", arm.widened_to)
                chained = self.arms[arm.widened_to].widened_to is not None
                _require(not chained, f"arms.{name}.widened_to {shown(arm.widened_to)} is itself widened")
                given = sorted({"width", "head_dim"} & set(arm.settings.get("model", {})))
                rule = "follows from widened_to; remove one of them"
                _require(not given, f"arms.{name}.model.{''.join(given[:1])} {rule}")
        for name in ("seeds", "tuning_seeds"):
            seeds = getattr(self, name)
            _require(bool(seeds), f"{name} must hold at least one seed")
            _require(len(set(seeds)) == len(seeds), f"{name} {shown(seeds)} must differ from each other")
            _require(all(0 <= seed < 2**32 for seed in seeds), f"{name} {shown(seeds)} must lie in [0, 2**32)")
        both = sorted(set(self.seeds) & set(self.tuning_seeds))
        _require(not both, f"tuning_seeds {shown(self.tuning_seeds)} must not be among seeds; {both[:1]} is")
        factors = self.learning_rate_factors
        _require(all(factor > 0 for factor in factors), f"learning_rate_factors {shown(factors)} must be positive")
        _require(1.0 in factors, f"learning_rate_factors {shown(factors)} must hold 1, the matched rate")
        _require(bool(self.readings), "readings must hold at least one, e.g. - {budget: tokens, seeds: 3}")
        same = {(reading.budget, reading.learning_rate) for reading in self.readings}
        _require(len(same) == len(self.readings), "readings: two have the same budget and learning_rate")
        for number, reading in enumerate(self.readings):
            path = f"readings.{number}"
            require_least(reading, path, 1, "seeds")
            most = len(self.seeds)
            require(
                reading, path, "seeds", reading.seeds <= most, f"are more than the {most} seeds", f"nearest: {most}"
            )

    def _require_arm(self, where: str, name: str) -> None:
        if name not in self.arms:
            similar = similar_names(name, list(self.arms))
            meant = f"did you mean {similar[0]!r}?" if similar else f"known: {', '.join(self.arms)}"
            raise InputError(f"{where} {shown(name)} is not an arm; {meant}")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InputError(message)


def load_study(path: str | Path) -> StudyConfig:
    """The study in a YAML file; files of experiments are named relative to it.

    Args:
        path: a YAML file with the fields of `StudyConfig`. An arm is a section of settings, and perhaps `widened_to`.

    Raises:
        InputError: the file cannot be read, is not YAML, or breaks a rule.
    """
    try:
        study = study_from(read_yaml(Path(path)))
    except InputError as error:
        raise InputError(f"{plain_path(path)}: {error}") from None
    folder = os.path.dirname(path)
    files = {name: os.path.normpath(os.path.join(folder, file)) for name, file in study.experiments.items()}
    return dataclasses.replace(study, experiments=files)


def study_from(tree: Settings) -> StudyConfig:
    """The study that nested dictionaries of text hold, as read from YAML; raises InputError."""
    tree = dict(tree)
    missing = [field.name for field in dataclasses.fields(StudyConfig) if field.default is dataclasses.MISSING]
    missing = [name for name in missing if name not in tree]
    _require(not missing, f"{', '.join(missing[:3])} is missing")
    experiments, arms, readings = tree.pop("experiments"), tree.pop("arms"), tree.pop("readings")
    _require(isinstance(experiments, dict), "experiments must be a section of names and files")
    for name, file in experiments.items():
        _require(isinstance(file, str) and bool(file.strip()), f"experiments.{plain(name)} must be the path of a file")
    _require(isinstance(arms, dict), "arms must be a section of names and settings")
    _require(isinstance(readings, list), "readings must be a list, e.g. - {budget: tokens, seeds: 3}")
    found = StudyConfig(
        experiments=experiments,
        arms={name: _arm(f"arms.{plain(name)}", arm) for name, arm in arms.items()},
        readings=tuple(_reading(f"readings.{number}", reading) for number, reading in enumerate(readings)),
        **typed_section(tree, StudyConfig, ""),
    )
    found.validate()
    return found


def _arm(path: str, tree: Any) -> Arm:
    tree = {} if tree is None else tree
    _require(isinstance(tree, dict), f"{path} must be a section of settings")
    tree = dict(tree)
    widened_to = tree.pop("widened_to", None)
    try:
        settings = typed_settings(tree)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    for key in SHARED:
        section, _, name = key.partition(".")
        inside = settings.get(section, {}) if name else settings
        _require((name or section) not in inside, f"{path}: {key} is the same for all arms; set it in the experiment")
    _require(widened_to is None or isinstance(widened_to, str), f"{path}.widened_to must name an arm")
    return Arm(settings, widened_to)


def _reading(path: str, tree: Any) -> Reading:
    _require(isinstance(tree, dict), f"{path} must be a section with keys budget, seeds, learning_rate")
    for key in ("budget", "seeds"):
        _require(key in tree, f"{path}.{key} is missing")
    return Reading(**typed_section(tree, Reading, f"{path}."))


def arm_config(study: StudyConfig, experiment: Settings, arm: str, width: int | None = None) -> Config:
    """The resolved configuration of an arm; what the study sets for each run (`SHARED`) is the experiment's.

    Args:
        study: valid.
        experiment: settings that the arms have in common.
        arm: its name.
        width: of a widened arm, once it is known.

    Raises:
        InputError: the settings break a rule.
    """
    settings = overlay(experiment, study.arms[arm].settings)
    if width is not None:
        settings = overlay(settings, _widened(settings, width))
    try:
        return from_settings(settings).resolve()
    except InputError as error:
        raise InputError(f"arm {arm}: {error}") from None


def _widened(settings: Settings, width: int) -> Settings:
    """The same heads, each wider."""
    heads = from_settings(settings).resolve().model.heads
    return {"model": {"width": width, "head_dim": width // heads}}


def load_experiment(files: list[str], overrides: Settings) -> Settings:
    """The settings of configuration files, later over earlier, and of overrides over them all."""
    return functools.reduce(overlay, [*map(load_file, files), overrides], {})


def require_effect(study: StudyConfig, overrides: Settings) -> None:
    """Checks that settings for all arms reach them; raises InputError for one that an arm sets to something else."""
    for name, arm in study.arms.items():
        for key, value in _leaves(overrides):
            own = dict(_leaves(arm.settings))
            if key in own and own[key] != value:
                raise InputError(f"--{key} {shown(value)} has no effect on arm {name}, which sets {shown(own[key])}")


def _leaves(settings: Settings, path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
