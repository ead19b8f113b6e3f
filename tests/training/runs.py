"""A run small enough to be made many times over: 11 steps an epoch, a second of training."""

import dataclasses
import json
import os
from pathlib import Path
import subprocess
import sys

import jax
import numpy as np

from ddl_jax.config import Config, DataConfig, MeshConfig, OptimizerConfig, TrainingConfig, TransformerConfig
from ddl_jax.training.checkpoint import Checkpoints
from ddl_jax.training.sharding import make_mesh, placed_state

ROOT = Path(__file__).parents[2]
STEPS, EPOCH = 26, 11  # the third epoch is under way at the end
CONTEXT, BATCH = 16, 4
EXACT = ("step", "tokens", "loss", "grad_norm", "parameter_norm", "learning_rate")

# Trains on eight devices, parameters divided over four of them, in the folder given.
ON_EIGHT = """
import dataclasses, pathlib, sys, jax
from ddl_jax.config import MeshConfig
from ddl_jax.training import train
from tests.training.runs import tiny_config

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_disable_most_optimizations", True)  # most of the time is compilation
config = tiny_config(pathlib.Path(sys.argv[1]), steps=8, checkpoint_every=4, batch_size=8, evaluation_batches=2)
sys.exit(train(dataclasses.replace(config, mesh=MeshConfig(data=2, fsdp=4))))
"""


def tiny_config(folder: Path, run: str = "run", **training) -> Config:
    """A run of STEPS steps over a corpus of its own with EPOCH steps an epoch."""
    corpus = folder / "corpus"
    if not corpus.exists():
        corpus.mkdir()
        for index in range(8):  # documents of 100 bytes and a separator; one of them is held out
            text = "".join(chr(97 + (index * 7 + place * place) % 26) for place in range(100))
            (corpus / f"{index}.txt").write_text(text)
    settings = {
        "steps": STEPS,
        "batch_size": BATCH,
        "log_every": 1,
        "evaluate_every": 13,
        "checkpoint_every": 3,
    } | training
    return Config(
        run_dir=str(folder / run),
        model=TransformerConfig(layers=2, width=8, heads=2, context_length=CONTEXT),
        data=DataConfig(corpus="files", paths=(str(corpus / "*.txt"),), validation_fraction=0.125),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=4),
        training=TrainingConfig(**settings),
    ).resolve()


def metrics(config: Config) -> list[dict]:
    lines = (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def exact_metrics(config: Config) -> list[tuple]:
    """What must be the same, bit for bit, in a run that was stopped and resumed."""
    return [tuple(record[name] for name in EXACT) for record in metrics(config)]


def final_state(config: Config) -> list[np.ndarray]:
    """The arrays of the newest checkpoint."""
    config = dataclasses.replace(settled(config), mesh=MeshConfig())  # on the devices here, whatever it ran on
    with Checkpoints(Path(config.run_dir) / "checkpoints", print) as checkpoints:
        return [
            np.asarray(leaf) for leaf in jax.tree.leaves(checkpoints.restore(placed_state(config, make_mesh(config))))
        ]


def settled(config: Config) -> Config:
    """The configuration as its run recorded it."""
    from ddl_jax.config.files import from_settings, load_file, typed_settings

    return from_settings(typed_settings(load_file(Path(config.run_dir) / "config.yaml"))).resolve()


def environment() -> dict[str, str]:
    """Of a process of its own, on CPUs."""
    return os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def python(code: str, *arguments: str, **keywords) -> subprocess.CompletedProcess:
    """Runs Python code in a process of its own, in the repository's root."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        **keywords,
    )
