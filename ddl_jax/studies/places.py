"""Where the runs of a study run: each on its own share of the machine's GPUs, or of its CPU cores."""

from collections.abc import Iterator
import contextlib
import dataclasses
import os
import subprocess
import sys
from typing import IO, Any

from ddl_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Place:
    """A share of the machine, on which one process runs at a time.

    Attributes:
        devices: GPUs, as CUDA_VISIBLE_DEVICES names them; None on CPUs.
        cores: CPU cores; None leaves them open.
    """

    devices: tuple[str, ...] | None = None
    cores: tuple[int, ...] | None = None


def places(platform: str, count: int, jobs: int | None) -> list[Place]:
    """Equal shares of the machine.

    One for each GPU, or for each CPU core: two runs with a core each finish sooner than one after the other with both.

    Args:
        platform: of jax's devices.
        count: how many GPUs there are, if it is "gpu".
        jobs: how many shares; by default as many as there can be.

    Raises:
        InputError: there are not so many.
    """
    if platform == "gpu":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        parts, what = visible.split(",")[:count] if visible else list(map(str, range(count))), "GPUs"
    elif platform == "cpu" and hasattr(os, "sched_setaffinity"):
        parts, what = sorted(os.sched_getaffinity(0)), "CPU cores"
    else:
        parts, what = [None], "device"
    jobs = len(parts) if jobs is None else jobs
    if jobs > len(parts):
        raise InputError(f"--jobs {jobs} is more than the {len(parts)} {what} here; nearest: {len(parts)}")
    if parts == [None]:
        return [Place()]
    size = len(parts) // jobs
    shares = [tuple(parts[size * job : size * (job + 1)]) for job in range(jobs)]
    return [Place(devices=share) if platform == "gpu" else Place(cores=share) for share in shares]


@contextlib.contextmanager
def _on(cores: tuple[int, ...] | None) -> Iterator[None]:
    """Processes started inside run on these cores."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def start(place: Place, arguments: list[str], output: int | IO, errors: int | IO) -> subprocess.Popen:
    """Starts a worker (`ddl_jax.studies.worker`) on a share of the machine; it ends when this process does.

    Args:
        place: the share.
        arguments: the worker's.
        output: where its stdout goes, as `subprocess.Popen` takes it.
        errors: likewise stderr.
    """
    environment: dict[str, Any] = dict(os.environ)
    if place.devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(place.devices)
    with _on(place.cores):
        return subprocess.Popen(
            command(arguments),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            process_group=0,  # Ctrl-C is for the study's process, which asks the workers
        )


def command(arguments: list[str]) -> list[str]:
    """The worker's command line."""
    return [sys.executable, "-m", "ddl_jax.studies.worker", *arguments]
