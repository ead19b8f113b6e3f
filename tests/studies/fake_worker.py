"""Stands in for `ddl_jax.studies.worker`: knows what the commands print and leave behind, and computes nothing.

What a run comes to is told by the name of its arm: `broken` diverges, `crash` fails, `slow` waits to be stopped.
"""

import json
import os
from pathlib import Path
import signal
import sys
import time

import yaml

BEST_RATE = 0.002


def step_seconds(model: dict) -> float:
    """Longer with the width, and half as long again for delta."""
    return 1e-3 * model["width"] * (1.5 if model["residual"]["kind"] == "delta" else 1.0)


def bench(files: list[str]) -> list[dict]:
    models = {file: yaml.safe_load(Path(file).read_text())["model"] for file in files}
    return [
        {
            "config": file, "train_step_seconds": step_seconds(model), "forward_seconds": 1e-3, "compile_seconds": 1.0,
            "device": os.environ.get("FAKE_DEVICE", "fake"), "parameters": model["width"] ** 2,
            "flops_per_token": 100 * model["width"],
        }
        for file, model in models.items()
    ]  # fmt: skip


def train(arguments: list[str]) -> int:
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    arm, steps = Path(given["--config"]).stem, int(given["--training.steps"])
    folder = Path(given["--run_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "starts", "a") as starts:
        starts.write(f"{sorted(os.sched_getaffinity(0))}\n")
    if arm == "slow" and not (folder / "stopped").exists():
        asked = []
        signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
        (folder / "waits").touch()
        while not asked:
            time.sleep(0.01)
        (folder / "stopped").touch()
        return 3
    if arm in ("broken", "crash"):
        print("diverged: loss is nan" if arm == "broken" else "failed: no space\n")
        return 4 if arm == "broken" else 1
    loss = 2 + abs(float(given["--optimizer.learning_rate"]) - BEST_RATE) + int(given["--seed"]) / 10
    record = {"step": steps, "loss": loss, "validation_loss": loss, "seconds": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "train":
        sys.exit(train(rest))
    if command == "devices":
        answer = {"platform": "cpu", "count": 1}
    elif command == "bench":
        answer = bench(rest[: rest.index("--rounds")])
    else:
        answer = {file: {"loss": 5.5, "sublayers": [{"relative_update": 1.0, "gate": None}]} for file in rest}
    print(json.dumps(answer))
