"""What one configuration will need, as a dictionary of plain numbers: the document that `ddl plan --json` prints."""

import collections
from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from ddl_jax.config import Config, ResidualConfig
from ddl_jax.plan.memory import by_kind, fit, line_by_formula
from ddl_jax.plan.program import Step
from ddl_jax.plan.sizes import cache_bytes, state_bytes
from ddl_jax.published import costs
from ddl_jax.transformer.costs import flops_per_token
from pallas_kernels import h200, hopper
from pallas_kernels.hopper.target import GPUS_PER_HOST

# Compared with the additive baseline.
COMPARED = (
    "parameters",
    "flops_per_token",
    "executed_flops_per_token",
    "peak_bytes_per_device",
    "hbm_bytes_per_step",
    "roofline_seconds",
)


def unnamed(config: Config) -> Config:
    """The configuration without what tells apart two runs of the same program."""
    return dataclasses.replace(config, run_dir="-")


def additive(config: Config) -> Config:
    """The same experiment on the plain residual stream, `unnamed`."""
    residual = ResidualConfig(kind="additive").resolve(config.model.width)
    return dataclasses.replace(unnamed(config), model=dataclasses.replace(config.model, residual=residual))


def measure(config: Config, devices: int, compiled: Callable[[Config], Step], fitted: bool) -> dict[str, Any]:
    """Measures a configuration.

    Args:
        config: `settled`.
        devices: how many H200s.
        compiled: the step of a configuration.
        fitted: whether the largest micro-batch is found by compiling others.
    """
    step, training, model = compiled(config), config.training, config.model
    tokens = training.batch_size * model.context_length
    seconds = _seconds(step.cost)
    caches = cache_bytes(model, training.microbatch_size)
    result = {
        "device": "h200",
        "devices": devices,
        "batch_size": training.batch_size,
        "microbatch_size": training.microbatch_size,
        "parameters": step.parameters,
        "flops_per_token": flops_per_token(model),
        "executed_flops_per_token": devices * sum(step.cost.flops.values()) / tokens,
        "peak_bytes_per_device": step.peak_bytes,
        "peak_bytes_by_kind": by_kind(step),
        "saved_arrays": _saved(step),
        "fits": step.peak_bytes <= h200.MEMORY,
        "hbm_bytes_per_step": step.cost.bytes,
        "hbm_bytes_by_kind": step.cost.bytes_by_kind(),
        "collective_bytes_per_step": step.cost.collective_bytes,
        "roofline_seconds": max(seconds.values()),
        "seconds_by_limit": seconds,
        "bound": max(seconds, key=seconds.get),
        "state_bytes": state_bytes(model, training.microbatch_size),
        "cache_bytes": sum(caches.values()),
        "cache_bytes_by_kind": caches,
        "kernels": step.kernels,
        "attention": step.attention,
        "remat": model.remat,
        "backward": model.residual.backward,
        "compute_dtype": model.compute_dtype,
        "state_dtype": model.state_dtype,
        "compile_seconds": step.seconds,
        "published": costs(model),
    }
    return result | _largest(config, step, compiled, fitted)


def _saved(step: Step) -> dict[str, int]:
    """What is saved for backward: bytes by type, such as `2 x bf16[12,8,1024,768]`, the most first."""
    counts = collections.Counter(step.saved)
    arrays = sorted(counts, key=lambda array: -counts[array] * array.bytes)
    return {f"{counts[a]} x {a}" if counts[a] > 1 else str(a): counts[a] * a.bytes for a in arrays}


def ratios(result: dict[str, Any], baseline: dict[str, Any]) -> dict[str, float | None]:
    """What `result` takes, as a multiple of what the baseline takes; None of nothing (a tiny model has no products)."""
    return {name: result[name] / baseline[name] if baseline[name] else None for name in COMPARED}


def _largest(config: Config, step: Step, compiled: Callable[[Config], Step], fitted: bool) -> dict[str, Any]:
    if not fitted:
        source = "one compilation: parameters, their gradients and the optimiser's state stay, the rest grows with it"
        return {"largest_microbatch": line_by_formula(config, step).largest(), "largest_microbatch_source": source}
    found = fit(config, compiled)
    sizes = ", ".join(str(size) for size, _ in found.peaks)
    return {
        "largest_microbatch": found.largest,
        "largest_microbatch_source": f"a line through two compilations, checked by another (micro-batches {sizes})",
        "fit": {"peaks": [list(peak) for peak in found.peaks], "predicted_peak_bytes": found.predicted},
    }


def _seconds(cost: hopper.Cost) -> dict[str, float]:
    """The time that each of the H200's limits allows at best."""
    near, far = cost.collective_bytes_within(GPUS_PER_HOST)
    return {
        "memory": cost.bytes / h200.BANDWIDTH,
        "compute": sum(flops / h200.PRODUCTS[dtype] for dtype, flops in cost.flops.items()),
        "network": near / h200.NVLINK + far / h200.NETWORK,
    }


def parts(step: Step, count: int) -> Sequence[hopper.Part]:
    """The instructions that move the most bytes."""
    return sorted(step.cost.parts, key=lambda part: -part.bytes)[:count]
