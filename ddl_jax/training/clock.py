"""How long the logged intervals take, and the speed that follows."""

from collections.abc import Collection, Iterator
import contextlib
import time

import jax

from ddl_jax.config import Config
from ddl_jax.transformer.costs import flops_per_token

# Dense bf16 peak in FLOP/s by jax's device kind, from the datasheets. Other devices get no MFU, not a wrong one.
PEAK_FLOPS = {"NVIDIA H200": 989e12}


class Clock:
    """Times the intervals between logged steps. Speed leaves out what is paused: evaluations and the start of saves."""

    def __init__(self, config: Config, step: int, devices: Collection[jax.Device]):
        self.tokens_per_step = config.training.batch_size * config.model.context_length
        self._flops_per_token = flops_per_token(config.model)
        bf16 = config.model.compute_dtype == "bfloat16"
        peaks = [PEAK_FLOPS[device.device_kind] for device in devices if bf16 and device.device_kind in PEAK_FLOPS]
        self._peak = sum(peaks) if len(peaks) == len(devices) else None
        self._begin(step)

    def _begin(self, step: int) -> None:
        self._begun, self._step, self._paused = time.monotonic(), step, 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside counts as time, not as training."""
        begun = time.monotonic()
        yield
        self._paused += time.monotonic() - begun

    def lap(self, step: int) -> dict[str, float]:
        """Ends the interval at `step`: its `seconds`, its `tokens_per_second`, and `mfu` where the peak is known."""
        seconds = time.monotonic() - self._begun
        speed = (step - self._step) * self.tokens_per_step / max(seconds - self._paused, 1e-9)
        self._begin(step)
        mfu = {"mfu": speed * self._flops_per_token / self._peak} if self._peak else {}
        return {"seconds": seconds, "tokens_per_second": speed} | mfu
