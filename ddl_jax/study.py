"""`ddl study run` and `ddl study report`: arms that differ in a few settings, compared seed by seed."""

import importlib
from pathlib import Path

from ddl_jax.command_line import config_parser, parse, read_overrides
from ddl_jax.config.rules import shown
from ddl_jax.config.study import StudyConfig, load_experiment, load_study, require_effect
from ddl_jax.errors import InputError, did_you_mean
from ddl_jax.stop import StopRequest

WORDS = {
    "run": "measures what the arms of a study cost and trains them, seed by seed; the same command goes on",
    "report": "what the runs of a study show: tables, plots, one page",
}


def usage() -> str:
    """The help: both words."""
    lines = [f"  {name:10} {text}" for name, text in WORDS.items()]
    return "\n".join(["usage: ddl study WORD [--help] ...", "", "words:", *lines])


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    if not arguments:
        raise InputError(f"ddl study needs a word; known: {', '.join(WORDS)}")
    word, *rest = arguments
    if word in ("-h", "--help"):
        print(usage())
        return 0
    if word not in WORDS:
        raise InputError(f"ddl study {shown(word)} is not known{did_you_mean(word, WORDS)}")
    return _run(rest) if word == "run" else importlib.import_module("ddl_jax.studies.reporting").main(rest)


def _run(arguments: list[str]) -> int:
    parser = config_parser(
        "ddl study run",
        "Measures what the arms of a study cost, then trains each with every seed, in pairs: the same data in the same "
        "order, and the same initial parameters wherever two arms have them. The same command again goes on.",
    )
    parser.usage = "%(prog)s STUDY.yaml [--experiment NAME] [--config FILE ...] [--KEY VALUE ...] [options]"
    add = parser.add_argument
    add("study", metavar="STUDY.yaml", help="the study: its arms, seeds and readings")
    add("--experiment", metavar="NAME", help="which of the study's experiments [default: its first]")
    add("--arms", metavar="NAME,...", help="make the runs of these arms only")
    add("--seeds", metavar="INT,...", help="make the runs of these seeds only, besides those that choose rates")
    add("--jobs", metavar="INT", help="runs at a time [default: one on each GPU, or on each CPU core]")
    add("--retry", action="store_true", help="begin again the runs that failed; one that diverged is a result")
    add("--dry-run", action="store_true", help="print the runs and how long they take, and stop")
    options = parse(parser, arguments)
    study = load_study(options.study)
    overrides = read_overrides(options)
    if "seed" in overrides:
        raise InputError("--seed does not apply: a study has seeds of its own; use --seeds to make the runs of some")
    require_effect(study, overrides)
    first = next(iter(study.experiments))
    name = first if options.experiment is None else options.experiment
    if name not in study.experiments:
        raise InputError(f"--experiment {shown(name)} is not in {options.study}{did_you_mean(name, study.experiments)}")
    default = study.run_dir if name == first else f"{study.run_dir}-{name}"
    folder = Path(overrides.pop("run_dir", default)).expanduser()
    experiment = load_experiment([study.experiments[name], *options.config], overrides)
    from ddl_jax.studies.running import Request, dry_run, run  # after parsing, so that a mistake is reported at once

    request = Request(
        study, experiment, folder, _arms(options.arms, study), _seeds(options.seeds, study), _jobs(options.jobs),
        options.retry,
    )  # fmt: skip
    if options.dry_run:
        return dry_run(request)
    with StopRequest() as stop:
        return run(request, stop)


def _arms(text: str | None, study: StudyConfig) -> tuple[str, ...]:
    names = tuple(study.arms) if text is None else tuple(text.split(","))
    for name in names:
        if name not in study.arms:
            raise InputError(f"--arms {shown(name)} is not an arm{did_you_mean(name, study.arms)}")
    return names


def _seeds(text: str | None, study: StudyConfig) -> tuple[int, ...]:
    if text is None:
        return study.seeds
    known = {f"{seed}": seed for seed in study.seeds}
    for seed in text.split(","):
        if seed not in known:
            raise InputError(f"--seeds {shown(seed)} is not one of the study's; known: {', '.join(known)}")
    return tuple(known[seed] for seed in text.split(","))


def _jobs(text: str | None) -> int | None:
    if text is not None and not (text.isdecimal() and 0 < int(text) < 10**4):
        raise InputError(f"--jobs {shown(text)} must be a whole number from 1; nearest: 1")
    return None if text is None else int(text)
