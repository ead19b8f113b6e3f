"""The settings of a run by several processes."""

import dataclasses
import re
from typing import Literal

from ddl_jax.config.rules import require, require_least, require_types, require_unset


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """Which processes train together, and how they find each other.

    Attributes:
        mode: `none` (this process alone), `auto` (as the cluster says: SLURM, Kubernetes, MPI) or `explicit`.
        coordinator: host:port of process 0, reachable from all; for mode `explicit`.
        processes: how many there are; for mode `explicit`.
        process_id: which of them this is, from 0; for mode `explicit`.
        timeout: seconds to wait for the others: to start, to write a checkpoint, and when one no longer answers.
    """

    mode: Literal["none", "auto", "explicit"] = "none"
    coordinator: str | None = None
    processes: int | None = None
    process_id: int | None = None
    timeout: int = 300

    def validate(self, path: str = "distributed") -> None:
        """Raises InputError on a broken rule."""
        require_types(self, path)
        require_least(self, path, 1, "processes", "timeout")
        names = ("coordinator", "processes", "process_id")
        if self.mode != "explicit":
            require_unset(self, path, names, f"{path}.mode is {self.mode!r}, not 'explicit'")
            return
        for name in names:
            require(self, path, name, getattr(self, name) is not None, f"is needed for {path}.mode 'explicit'")
        address = re.fullmatch(r"(?:[^\s:]+|\[[\da-fA-F:.]+\]):(\d{1,5})", self.coordinator)
        right = address is not None and 0 < int(address[1]) < 2**16
        require(self, path, "coordinator", right, "must be host:port", "e.g. '10.0.0.1:8476'")
        last = self.processes - 1
        rule = f"must lie in [0, {path}.processes), which is {self.processes}"
        nearest = f"nearest: {min(max(self.process_id, 0), last)}"
        require(self, path, "process_id", 0 <= self.process_id <= last, rule, nearest)
