"""`ddl study run`: measures what the arms cost, then makes the runs that the readings look at."""

from collections.abc import Callable, Collection, Mapping, Sequence
import contextlib
import dataclasses
import functools
import json
from pathlib import Path
import subprocess
import tempfile
from typing import Any

from rich.console import Console

from ddl_jax.config import Config
from ddl_jax.config.files import Settings, dump_config
from ddl_jax.config.study import StudyConfig, arm_config
from ddl_jax.errors import InputError, RunError
from ddl_jax.stop import StopRequest
from ddl_jax.studies import folder as study_folder
from ddl_jax.studies.design import PlannedRun
from ddl_jax.studies.jobs import Jobs
from ddl_jax.studies.measuring import measure
from ddl_jax.studies.places import Place, places, start
from ddl_jax.studies.schedule import Plan, plan
from ddl_jax.studies.table import Display, said, show_plan

DONE, FAILED, STOPPED = 0, 1, 3  # exit codes
PER_HEAD = {"gpu": 8}  # features of a widened head are a multiple of it; elsewhere of 2, for RoPE


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        study: valid.
        experiment: settings that its arms have in common.
        folder: of the study.
        arms: for which runs are made.
        seeds: for which they are.
        jobs: runs at a time; by default one on each GPU or CPU core.
        retry: whether runs that failed are begun again.
    """

    study: StudyConfig
    experiment: Settings
    folder: Path
    arms: Collection[str]
    seeds: Collection[int]
    jobs: int | None = None
    retry: bool = False


class Stopped(Exception):
    """A stop was asked for before the first run."""


def run(request: Request, stop: StopRequest) -> int:
    """Runs a study, or goes on with it.

    Returns:
        The exit code: 0 done, 1 if a run failed other than by diverging, 3 stopped on request.

    Raises:
        InputError: the folder holds another study, or an arm cannot run here.
    """
    console = Console(highlight=False)
    _configs(request, None)  # every arm's settings are valid before anything is written
    with study_folder.held(request.folder):
        try:
            found = _devices(stop)
            shares = places(found["platform"], found["count"], request.jobs)
            measured = _measured(request, shares[0], PER_HEAD.get(found["platform"], 2), stop, console)
        except Stopped:
            console.print("Stopped on request before the first run. The same command begins with measuring.")
            return STOPPED
        configs = _configs(request, measured)
        jobs = Jobs(request.folder, configs, measured["arms"], shares, _planned(request, measured), request.retry)
        with jobs, Display(request.study.question, console) as display:
            jobs.work(stop, display)
    return _farewell(jobs, request, bool(stop), console)


def dry_run(request: Request) -> int:
    """Prints which runs would be made, and how long they would take; writes nothing."""
    console = Console(highlight=False)
    measured = study_folder.read_json(request.folder / "measured.json")
    configs = _configs(request, measured)
    study_folder.require_as_begun(request.folder, request.study, _known(request, configs, measured))
    found = _devices(StopRequest())
    shares = places(found["platform"], found["count"], request.jobs)
    if measured is None or not _covers(measured, request.study):
        show_plan(request.study, request.arms, console)
        return DONE
    jobs = Jobs(request.folder, configs, measured["arms"], shares, _planned(request, measured), request.retry)
    show_plan(request.study, request.arms, console, jobs.rows())
    console.print(f"{jobs.summary()}, {len(shares)} at a time")
    return DONE


def _planned(request: Request, measured: Mapping[str, Any]) -> Callable[[Mapping[PlannedRun, float]], Plan]:
    shared = study_folder.shared_by_arms(request.experiment)
    costs = study_folder.costs_of(measured)
    return lambda losses: plan(request.study, shared, costs, losses, request.arms, request.seeds)


def _configs(request: Request, measured: Mapping[str, Any] | None) -> dict[str, Config]:
    """Of every arm; one that is widened has the experiment's width until that is measured."""
    widened = {} if measured is None else measured["widened"]
    widths = {arm: found["width"] for arm, found in widened.items()}
    return {arm: arm_config(request.study, request.experiment, arm, widths.get(arm)) for arm in request.study.arms}


def _known(request: Request, configs: Mapping[str, Config], measured: Mapping[str, Any] | None) -> dict[str, Config]:
    """Those that do not wait for a width."""
    widened = {} if measured is None else measured["widened"]
    return {name: configs[name] for name, arm in request.study.arms.items() if not arm.widened_to or name in widened}


def _covers(measured: Mapping[str, Any], study: StudyConfig) -> bool:
    return study.arms.keys() <= measured["arms"].keys()


def _measured(request: Request, place: Place, per_head: int, stop: StopRequest, console: Console) -> dict[str, Any]:
    """What the arms cost: as measured before, and now for those that are new. Writes all that precedes the runs."""
    folder, study = request.folder, request.study
    file = folder / "measured.json"
    measured = study_folder.read_json(file)
    study_folder.require_as_begun(folder, study, _known(request, _configs(request, measured), measured))
    study_folder.write_study(folder, study, request.experiment)
    with console.status("") as status:

        def say(text: str) -> None:
            status.update(f"measuring {text}")
            if not console.is_terminal:
                console.print(f"measuring {text}")

        if measured is None or not _covers(measured, study):
            known = {} if measured is None else measured["arms"]
            new = [arm for arm in study.arms if arm not in known]
            with tempfile.TemporaryDirectory() as scratch:
                bench = functools.partial(_bench, Path(scratch), place, stop)
                found = measure(study, request.experiment, new, per_head, bench, say)
            cores = None if place.cores is None else len(place.cores)
            found |= {"reference": study.reference, "cores": cores}
            if measured is not None:
                if measured["device"] != found["device"]:
                    was = f"on {measured['device']}, not {found['device']}"
                    raise InputError(f"{folder} holds a study that was measured {was}; use another --run_dir")
                found["arms"] |= measured["arms"]  # what runs have used stays
                found["widened"] |= measured["widened"]
            measured = found
            study_folder.write_json(file, measured)
        configs = _configs(request, measured)
        files = {arm: study_folder.write_arm(folder, arm, config) for arm, config in configs.items()}
        initial = study_folder.read_json(folder / "initial.json") or {}
        new = {str(file): arm for arm, file in files.items() if arm not in initial}
        if new:
            say("the arms' first updates")
            found = _answer(place, ["initial", *new], stop)
            initial |= {new[file]: statistics for file, statistics in found.items()}
            study_folder.write_json(folder / "initial.json", initial)
    if measured["cores"] is not None and place.cores is not None and measured["cores"] != len(place.cores):
        console.print(
            f"Note: the arms' costs were measured with {measured['cores']} CPU cores for each run, and stay as they "
            f"are; now each has {len(place.cores)}."
        )
    return measured


def _bench(
    scratch: Path, place: Place, stop: StopRequest, configs: Mapping[str, Config], rounds: int
) -> dict[str, dict]:
    names = {}
    for name, config in configs.items():
        file = scratch / f"{name}.yaml"
        file.write_text(dump_config(config), encoding="utf-8")
        names[str(file)] = name
    results = _answer(place, ["bench", *names, "--rounds", str(rounds), "--json"], stop)
    return {names[result["config"]]: result for result in (results if isinstance(results, list) else [results])}


def _devices(stop: StopRequest) -> dict[str, Any]:
    return _answer(Place(), ["devices"], stop)


def _answer(place: Place, arguments: Sequence[str], stop: StopRequest) -> Any:
    """The JSON document that a worker prints.

    Raises:
        InputError: it says that the input cannot be used.
        RunError: it fails otherwise.
        Stopped: a stop was asked for meanwhile.
    """
    # Files, not pipes: waiting for pipes would close the one that tells the worker that we are there.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+", errors="replace") as errors:
        worker = start(place, list(arguments), output, errors)
        try:
            while worker.poll() is None:
                if stop:
                    raise Stopped
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.wait(timeout=0.1)
        finally:
            worker.kill()
            worker.wait()
            worker.stdin.close()
        output.seek(0)
        errors.seek(0)
        if worker.returncode == 0:
            return json.loads(output.read())
        lines = errors.read().split("\n")
    last = next((line for line in reversed(lines) if line.strip()), f"it ended with code {worker.returncode}")
    if worker.returncode == 2:
        raise InputError(last.removeprefix("error: "))
    raise RunError(f"{arguments[0]} of the arms failed: {last.removeprefix('failed: ')}")


def _farewell(jobs: Jobs, request: Request, stopped: bool, console: Console) -> int:
    failed = [run for run in jobs.failures if jobs.state(run) == "failed"]
    for run, message in jobs.failures.items():
        log = run.beside(request.folder, "log")
        console.print(f"{said(run)}: {message} (see {log})", markup=False, soft_wrap=True)
    console.print(jobs.summary(), markup=False, soft_wrap=True)
    if failed:
        console.print("Runs that failed are begun again with --retry.")
    if stopped and jobs.waiting():
        console.print("Stopped on request; what was running is saved. The same command goes on from there.")
        return STOPPED
    console.print(f"Next: python -m ddl_jax study report {request.folder}", markup=False, soft_wrap=True)
    return FAILED if failed else DONE
