"""`ddl evaluate`: how good a trained run is, on its held-out text and at the tasks of lm-evaluation-harness."""

from collections.abc import Sequence
import importlib.util
import json
from pathlib import Path
import sys
from typing import TYPE_CHECKING

import jsonargparse

from ddl_jax.command_line import parse, plain_parser
from ddl_jax.config.files import typed_settings
from ddl_jax.config.rules import shown
from ddl_jax.errors import InputError, is_out_of_memory
from ddl_jax.evaluation import paper

if TYPE_CHECKING:
    from ddl_jax.evaluation.devices import Placed
    from ddl_jax.run import Run

COUNTS = {"batches": 1, "batch_size": 1, "num_fewshot": 0, "limit": 1}  # options that are whole numbers, and the least
DIGITS = 9  # of them, at most


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    options = parse(_parser(), arguments)
    if options.run is None:
        raise InputError("--run is missing; name the run_dir of a run, e.g. --run runs/quickstart")
    counts = {name: _count(name, options[name], least) for name, least in COUNTS.items()}
    names = _task_names(options, counts)
    paths = None
    if options["data.paths"] is not None:
        paths = typed_settings({"data": {"paths": options["data.paths"]}})["data"]["paths"]

    from ddl_jax.evaluation.devices import on_all_devices
    from ddl_jax.evaluation.report import show
    from ddl_jax.run import load_checkpoint

    run, step = load_checkpoint(options.run)
    placed = on_all_devices(run, counts["batch_size"])
    # What can be refused is, before anything takes long.
    below = options.skip_below
    validate = None if options.no_validation else _validation(run, placed, paths, counts["batches"], below)
    score = _scoring(run, placed, names, options.include_path, counts) if names else None
    result = {"run": options.run, "step": step, "validation_loss": None, "perplexity": None, "bits_per_byte": None}
    result |= {"validation_tokens": None, "tasks": {}}
    try:
        result |= validate() if validate else {}
        result |= score() if score else {}
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print(
            f"failed: out of memory; try a smaller --batch-size ({' '.join(str(error).split())[:200]})", file=sys.stderr
        )
        return 1
    if options.json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        show(result, run.config.model)
    return 0


def _parser() -> jsonargparse.ArgumentParser:
    parser = plain_parser(
        "ddl evaluate",
        "Scores the newest checkpoint of a run on all devices of this machine: its loss on the held-out text, and its "
        "answers to tasks of lm-evaluation-harness (extra `eval`). The run's folder is only read.",
        "--run DIR [--KEY VALUE ...]",
    )
    parser.add_argument("--run", metavar="DIR", help="the run_dir of a run")
    for name, metavar, text in (
        ("batches", "INT", "batches of held-out text, such as the run's training.evaluation_batches [default: all]"),
        ("batch-size", "INT", "sequences at a time, over all devices [default: 16 for each]"),
        ("data.paths", "[ITEM,...]", "where the run's text is now, if it has moved"),
        ("tasks", "NAME,...", f"tasks, groups or tags of the harness; or '{paper.NAME}': the paper's eight, zero- and "
         "one-shot, beside its published rows"),
        ("num-fewshot", "INT", "solved examples before each question [default: as each task says]"),
        ("limit", "INT", "questions of each task, its first ones [default: all]"),
        ("include-path", "DIR", "folder with tasks of your own, in the harness's YAML"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", metavar=metavar, default=None, help=text)
    parser.add_argument(
        "--skip-below",
        type=float,
        metavar="NUMBER",
        help="also measure what leaving out edits with a gate below this saves and costs, on the held-out text",
    )
    parser.add_argument("--no-validation", action="store_true", help="leave the held-out text out")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else on stdout")
    return parser


def _count(name: str, text: str | None, least: int) -> int | None:
    if text is None:
        return None
    large = text.isdecimal() and len(text) > DIGITS
    if large or not text.isdecimal() or int(text) < least:
        most = 10**DIGITS - 1
        raise InputError(
            f"--{name.replace('_', '-')} {shown(text)} must be a whole number from {least} to {most}; "
            f"nearest: {most if large else least}"
        )
    return int(text)


def _task_names(options: jsonargparse.Namespace, counts: dict[str, int | None]) -> tuple[str, ...]:
    """The names in `--tasks`; raises InputError where the options contradict each other."""
    if options.no_validation and options.skip_below is not None:
        raise InputError("--skip-below is measured on the held-out text; leave --no-validation out")
    if options.tasks is None:
        given = [name for name in ("num_fewshot", "limit", "include_path") if options[name] is not None]
        if given:
            raise InputError(f"--{given[0].replace('_', '-')} is of tasks; name them with --tasks")
        if options.no_validation:
            raise InputError("--no-validation without --tasks leaves nothing to do; name tasks")
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in options.tasks.split(",") if name.strip()))
    if not names:
        raise InputError(f"--tasks {options.tasks!r} names no task; e.g. 'sciq,piqa', or '{paper.NAME}'")
    if paper.NAME in names and len(names) > 1:
        raise InputError(f"--tasks '{paper.NAME}' stands for the paper's eight tasks; ask for others in another run")
    if paper.NAME in names and counts["num_fewshot"] is not None:
        raise InputError(f"--num-fewshot goes without --tasks '{paper.NAME}', which is zero- and one-shot")
    if options.include_path is not None and not Path(options.include_path).expanduser().is_dir():
        raise InputError(f"--include-path {options.include_path!r} is not a folder; name one that holds tasks")
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError("--tasks needs the package 'lm_eval', which is not installed; pip install -e '.[eval]'")
    return names


def _validation(run: "Run", placed: "Placed", paths: tuple[str, ...] | None, batches: int | None, below: float | None):
    """The function that gives the part of the result that is about the held-out text, which is at hand by then."""
    from ddl_jax.evaluation.held_out_text import held_out_tokens, validate_run
    from ddl_jax.evaluation.skipping import cost_of_skipping
    from ddl_jax.inference import skipping

    if below is not None:
        skipping(run.model, below)
    held_out = held_out_tokens(run.config, paths)

    def validate() -> dict:
        found = validate_run(run, placed=placed, tokens=held_out, batches=batches)
        windows = found.tokens // run.config.model.context_length
        cost = {} if below is None else {"skipping": cost_of_skipping(run, placed, held_out, windows, below)}
        return cost | {
            "validation_loss": found.loss,
            "perplexity": found.perplexity,
            "bits_per_byte": found.bits_per_byte,
            "validation_tokens": found.tokens,
        }

    return validate


def _scoring(run: "Run", placed: "Placed", names: Sequence[str], folder: str | None, counts: dict[str, int | None]):
    """The function that gives the part of the result that is about tasks, whose data sets are at hand by then."""
    from ddl_jax.evaluation import hub

    hub.settle()
    from ddl_jax.evaluation.harness import HarnessModel
    from ddl_jax.evaluation.tasks import find_tasks, require_data, run_tasks

    whole = names == (paper.NAME,)
    names = paper.TASKS if whole else names
    manager = find_tasks(names, None if folder is None else Path(folder).expanduser())
    require_data(manager, names, max(paper.SHOTS) if whole else counts["num_fewshot"])
    model = HarnessModel(run, placed)

    def score() -> dict:
        if not whole:
            return {"tasks": run_tasks(model, manager, names, counts["num_fewshot"], counts["limit"])}
        found = {name: run_tasks(model, manager, names, shots, counts["limit"]) for shots, name in paper.SHOTS.items()}
        return {
            "tasks": {task: {name: found[name][task] for name in found} for task in names},
            "paper": {
                **{name: paper.figures(metrics) for name, metrics in found.items()},
                "published": {n: paper.published_rows(run.config.model, shots) for shots, n in paper.SHOTS.items()},
            },
        }

    return score
