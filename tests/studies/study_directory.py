"""Study directories made by hand, with runs whose losses are known."""

import dataclasses
import json

from ddl_jax.config.study import Arm, Reading, StudyConfig
from ddl_jax.studies.design import Cost, PlannedRun

STEPS, RATE, TOKENS_PER_STEP = 100, 0.002, 4 * 32
EXPERIMENT = {
    "model": {"context_length": 32},
    "training": {"steps": STEPS, "batch_size": 4},
    "optimizer": {"learning_rate": RATE, "warmup_steps": 10, "betas": [0.9, 0.95]},
}
# The plain arm's steps take half the time and two thirds of the FLOPs.
COSTS = {
    "plain": Cost(0.5, 200, 1000, 16),
    "delta": Cost(1.0, 300, 1100, 16),
    "wide": Cost(0.8, 600, 2000, 24),
}
TOKENS, FLOPS, SECONDS = Reading("tokens", 3), Reading("flops", 3), Reading("seconds", 3)
TUNED = Reading("tokens", 3, "tuned")


def study(*readings, **changes):
    """Three arms, three seeds."""
    given = {
        "question": "Is delta better?",
        "run_dir": "runs/made",
        "experiments": {"tiny": "tiny.yaml"},
        "baseline": "plain",
        "reference": "delta",
        "arms": {name: Arm({"model": {"residual": {"kind": "additive"}}}) for name in COSTS},
        "readings": readings or (TOKENS,),
        "differences": ("delta - wide",),
    }
    return StudyConfig(**given | changes)


def begin(folder, config, costs=COSTS):
    """Writes what precedes the runs."""
    folder.mkdir(parents=True, exist_ok=True)
    settled = {"study": dataclasses.asdict(config), "experiment": EXPERIMENT}
    measured = {"arms": {arm: dataclasses.asdict(cost) for arm, cost in costs.items()}, "device": "made", "rounds": 3}
    updates = [{"relative_update": 0.5, "gate": None}, {"relative_update": 0.25, "gate": 1.5}]
    initial = {"delta": {"loss": 5.5, "sublayers": updates}}
    for name, tree in (("study", settled), ("measured", measured), ("initial", initial)):
        (folder / f"{name}.json").write_text(json.dumps(tree))
    return folder


def add(folder, arm, seed, loss, *, steps=STEPS, rate=RATE, until=None, failure=None):
    """Writes a run: its loss falls to the one given, in four evaluations; or it ends before its end, and says why."""
    run = PlannedRun(arm, steps, rate, seed)
    directory = run.folder(folder)
    directory.mkdir(parents=True)
    last = steps if until is None else until
    evaluated = {max(1, steps * quarter // 4) for quarter in (1, 2, 3, 4)}
    lines = []
    for step in sorted({*evaluated, last}):
        validation = {"validation_loss": loss + (steps - step) / steps} if step in evaluated else {}
        lines += [{"step": step, "loss": 9.0} | validation] if step <= last else []
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9')
    if failure is not None:
        record = {"exit_code": failure[0], "message": failure[1]}
        directory.with_name(f"{run.name}.failed.json").write_text(json.dumps(record))
