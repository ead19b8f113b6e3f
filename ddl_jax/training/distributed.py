"""Several processes that train together: how they meet, agree, and end when one of them is gone.

Every process runs the same program; process 0 alone writes and prints. What only one of them can see, such as a signal
or a full disk, is made known to all before any acts on it: one that stops alone leaves the others waiting for it.
"""

from collections.abc import Callable
import ctypes
import json
import os
import signal
import socket

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from ddl_jax.config import Config, DistributedConfig
from ddl_jax.config.files import require_same, to_dict
from ddl_jax.errors import InputError, RunError

LONGEST = 1000  # bytes of a message that one process tells the others
GO_ON, STOP, FAILED = range(3)  # what a process has to say after a step; the largest is heard


def join(config: DistributedConfig) -> None:
    """Meets the other processes, before anything else asks jax for its devices.

    Args:
        config: resolved. Nothing happens in mode `none`, nor where the program has called `jax.distributed` itself.

    Raises:
        InputError: mode `auto`, and no cluster that jax knows; or process 0, and the coordinator's port is taken.
        RunError: the processes did not meet.
    """
    if config.mode == "none" or jax.distributed.is_initialized():
        return
    if config.process_id == 0:
        _require_free(config)
    seconds = {"initialization_timeout": config.timeout, "heartbeat_timeout_seconds": config.timeout}
    who = dict(zip(("coordinator_address", "num_processes", "process_id"), _address(config), strict=True))
    # SIGTERM is our own affair (`ddl_jax.stop`): jax's service would take it away.
    jax.config.update("jax_enable_preemption_service", False)
    where = f" at distributed.coordinator {config.coordinator!r}" if config.coordinator else ""
    _last_words(f"the processes did not all meet{where} within distributed.timeout, {config.timeout} seconds")
    visible = jax.config.values["jax_cuda_visible_devices"]
    try:
        jax.distributed.initialize(**who, **seconds, shutdown_timeout_seconds=config.timeout)
    except ValueError as error:
        raise InputError(
            f"distributed.mode 'auto' finds no cluster here that jax knows ({' '.join(str(error).split())}); use "
            "'explicit', or 'none'"
        ) from None
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise RunError(f"the processes did not meet{where}: {reason}") from error
    if "JAX_LOCAL_DEVICE_IDS" not in os.environ:
        # Under SLURM and MPI, jax leaves a process one GPU, as if each GPU had its own. Ours has all that it sees.
        jax.config.update("jax_cuda_visible_devices", visible)
    _last_words(
        f"another process has ended, or did not answer for distributed.timeout, {config.timeout} seconds; see what it "
        "said. The same command, given to all again, goes on from the last checkpoint"
    )


def _require_free(config: DistributedConfig) -> None:
    """Raises InputError where process 0 cannot listen on its port: jax would crash (0.11, 0.12: without a word)."""
    port = int(config.coordinator.rpartition(":")[2])
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise InputError(
            f"distributed.coordinator {config.coordinator!r}: port {port} cannot be listened on here "
            f"({os.strerror(error.errno)}); give all processes another one"
        ) from None


def _address(config: DistributedConfig) -> tuple[str | None, int | None, int | None]:
    return config.coordinator, config.processes, config.process_id


def _last_words(reason: str) -> None:
    """Has the process end with one line and exit code 1 where jax would abort it.

    jax's coordination gives up from C++, without an exception: it logs at length, and aborts. (Both jax 0.11 and 0.12;
    a release in which `initialize` raises, and a lost process is an exception, frees us of this.)
    """
    global _on_abort  # C keeps no reference

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def _on_abort(number):
        os.write(2, f"failed: {reason}\n".encode())
        os._exit(1)

    ctypes.CDLL(None).signal(signal.SIGABRT, _on_abort)


def writes() -> bool:
    """Whether this is the process that writes and prints."""
    return jax.process_index() == 0


def together[T](action: Callable[[], T]) -> T:
    """Runs something on every process; where it fails on one, it fails on all.

    Raises:
        InputError, RunError, OSError: as `action` here; else the first other process's, its message with its number.
    """
    if jax.process_count() == 1:
        return action()
    result, failure = None, None
    try:
        result = action()
    except (InputError, RunError, OSError) as error:
        failure = error
    text = b"" if failure is None else ("IR"[not isinstance(failure, InputError)] + str(failure)).encode()[:LONGEST]
    told = multihost_utils.process_allgather(np.frombuffer(text.ljust(LONGEST, b"\0"), np.uint8))
    if failure is not None:
        raise failure
    for process, row in enumerate(np.asarray(told).reshape(-1, LONGEST)):
        message = row.tobytes().rstrip(b"\0").decode(errors="replace")
        if message:
            raise (InputError if message[0] == "I" else RunError)(f"process {process}: {message[1:]}")
    return result


def require_same_settings(config: Config) -> None:
    """Checks that all processes train the same: else they wait for each other forever, or train a mixture in silence.

    Raises:
        InputError: on all, where the settings of one are not those of process 0.
    """
    if jax.process_count() == 1:
        return
    text = np.frombuffer(json.dumps(to_dict(config)).encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.array(text.size)))
    first = multihost_utils.broadcast_one_to_all(np.resize(text, length))
    together(lambda: require_same(json.loads(np.asarray(first).tobytes()), config))


def first_then_others[T](action: Callable[[], T]) -> T:
    """`together`, but process 0 before the others: they find what it has made."""
    if writes():
        result = together(action)
        together(lambda: None)
        return result
    together(lambda: None)
    return together(action)


def anywhere(mine: bool) -> bool:
    """Whether any process says so."""
    return mine if jax.process_count() == 1 else bool(np.any(multihost_utils.process_allgather(np.array(mine))))


class Agreement:
    """What the processes say after each step: called by all, it gives all of them the largest of what they say.

    With several processes it is what they said one step before, so that no device waits for the host.
    """

    def __init__(self, mesh: Mesh):
        self._waiting = None
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._largest = jax.jit(lambda said: said.max(), out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._local = len(mesh.local_devices)

    def __call__(self, mine: int) -> int:
        if jax.process_count() == 1:
            return mine
        said = jax.make_array_from_process_local_data(self._sharding, np.full(self._local, mine, np.int32))
        before, self._waiting = self._waiting, self._largest(said)
        return GO_ON if before is None else int(before)
