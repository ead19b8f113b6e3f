"""Training steps on meshes of eight CPU devices and on one: `python -m tests.training.on_eight_devices FILE`.

A program of its own, since how many devices a process has is settled before its first computation. `test_sharding.py`
runs it once, and looks at the numbers that it leaves in FILE.
"""

import json
import sys

import jax
import numpy as np
import optax

from ddl_jax.config import Config, MeshConfig, OptimizerConfig, TrainingConfig, TransformerConfig
from ddl_jax.training.sharding import first_state, make_mesh, place_batch, placed_batch, placed_state
from ddl_jax.training.step import Batch, make_evaluation_step, make_train_step, model_graph
from pallas_kernels.hopper import collectives
from tests.residual.streams import STREAMS

BATCH, TOKENS, VOCAB, WIDTH, STEPS = 8, 6, 13, 24, 4
DATA, FSDP, TENSOR = {}, {"data": 1, "fsdp": 8}, {"data": 4, "tensor": 2}
ALL = {"data": 2, "fsdp": 2, "tensor": 2}
# Of the cases whose heads are divided, this one has the norm and the gate of what they give.
GATED = "official"

# Each kind of stream, and each reader, expansion, preset and direction, on some mesh; each mesh with some stream.
CASES = {
    "additive": DATA,
    "additive_expanded token repeat": ALL,
    "delta": ALL,
    "delta mlp": FSDP,
    "official": TENSOR,
    "write_only attention": {"data": 4, "fsdp": 2},
    "hyper_connections V2": {"data": 2, "tensor": 2, "fsdp": 2},
    "mhc V3": TENSOR,
}


def configuration(stream: str, mesh: dict, micro: int | None = 1) -> Config:
    model = TransformerConfig(
        layers=2, width=WIDTH, heads=2, vocab_size=VOCAB, context_length=TOKENS, residual=STREAMS[stream],
        output_gate=stream == GATED,
    )  # fmt: skip
    return Config(
        model=model,
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        training=TrainingConfig(steps=100, batch_size=BATCH, microbatch_size=micro),
        mesh=MeshConfig(**mesh),
    ).resolve()


def batch() -> Batch:
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, VOCAB, (2, BATCH, TOKENS)).astype(np.int32)
    return Batch(tokens, np.where(rng.random((BATCH, TOKENS)) < 0.3, -1, targets))  # uneven over the sequences


def compiled(config: Config, devices: int):
    mesh = make_mesh(config, jax.devices()[:devices])
    config = config.on(devices)
    step = jax.jit(make_train_step(model_graph(config, jax.devices()[:devices]), config, mesh), donate_argnums=0)
    return config, mesh, step.lower(placed_state(config, mesh), placed_batch(config, mesh)).compile()


def arrays(tree) -> list[np.ndarray]:
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]


def trained(config: Config, devices: int) -> dict:
    """What a few steps come to."""
    config, mesh, step = compiled(config, devices)
    state, placed = first_state(config, mesh), place_batch(batch(), mesh)
    start, metrics, gradient = arrays(state.parameters), [], None
    for _ in range(STEPS):
        state, found = step(state, placed)
        metrics.append({name: float(value) for name, value in found.items()})
        gradient = gradient or arrays(optax.tree.get(state.optimizer, "mu"))  # after one step, a tenth of it
    return {
        "metrics": metrics,
        "gradient": gradient,
        "start": start,
        "moved": [after - before for after, before in zip(arrays(state.parameters), start, strict=True)],
        "slices": sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(state.parameters)),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.parameters)),
    }


def evaluated(config: Config, devices: int) -> float:
    mesh = make_mesh(config, jax.devices()[:devices])
    step = make_evaluation_step(model_graph(config), config.on(devices), mesh)
    parameters = first_state(config, mesh).parameters
    return float(jax.jit(step)(parameters, place_batch(batch(), mesh)))


def difference(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    """The largest distance between two arrays as a share of the first's size."""
    pairs = zip(one, other, strict=True)
    return max(float(np.linalg.norm(a - b) / max(np.linalg.norm(a), 1e-30)) for a, b in pairs)


def compared(stream: str, mesh: dict) -> dict:
    one, many = (trained(configuration(stream, *how), n) for how, n in ((({}, None), 1), ((mesh,), 8)))
    return {
        "loss": [[step["loss"] for step in run["metrics"]] for run in (one, many)],
        "grad_norm": [[step["grad_norm"] for step in run["metrics"]] for run in (one, many)],
        "start": difference(one["start"], many["start"]),
        "gradient": difference(one["gradient"], many["gradient"]),
        "moved": difference(one["moved"], many["moved"]),
        "slices": many["slices"],
        "parameters": many["parameters"],
    }


def exchanged(stream: str, mesh: dict) -> dict[str, list]:
    """The collectives of a step of several microbatches: shapes of their results, and bytes."""
    _, _, step = compiled(configuration(stream, mesh), 8)
    return {name: [[c.shape, c.bytes] for c in found] for name, found in collectives(step).items()}


def main(file: str) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_disable_most_optimizations", True)  # most of the time is compilation
    results = {
        "compared": {stream: compared(stream, mesh) for stream, mesh in CASES.items()},
        "evaluated": [evaluated(configuration("delta", mesh), n) for mesh, n in (({}, 1), (ALL, 8))],
        "exchanged": {name: exchanged("delta", mesh) for name, mesh in (("data", {"data": 8}), ("fsdp", FSDP))},
    }
    with open(file, "w", encoding="utf-8") as out:
        json.dump(results, out)


if __name__ == "__main__":
    main(sys.argv[1])
