"""What `kernel` of a stream's configuration comes to on given devices."""

from collections.abc import Sequence
import dataclasses

import jax

from ddl_jax.config import ResidualConfig
from ddl_jax.config.kernels import unsupported
from ddl_jax.errors import InputError
from pallas_kernels import dispatch


def explain(
    config: ResidualConfig, width: int, devices: Sequence[jax.Device] | None = None, path: str = "model.residual"
) -> str:
    """Which implementation of the stream's operations runs, and why, for a start-up line.

    Args:
        config: resolved.
        width: d.
        devices: those compiled for; the local ones by default.
        path: of the configuration, for the message.

    Returns:
        Such as "Pallas (Hopper)" or "XLA: no Hopper GPU here"; nothing for a stream that has no kernels.

    Raises:
        InputError: `pallas`, and the devices are neither Hopper GPUs nor CPUs.
    """
    reasons = unsupported(config, width)
    try:
        texts = {name: dispatch.explain(config.kernel, reason, devices) for name, reason in reasons.items()}
    except ValueError as error:
        raise InputError(f"{path}.kernel {config.kernel!r} cannot run: {error}; use 'auto'") from None
    if len(set(texts.values())) <= 1:
        return next(iter(texts.values()), "")
    return ", ".join(f"{name} by {text}" for name, text in texts.items())


def decided(config: ResidualConfig, devices: Sequence[jax.Device]) -> ResidualConfig:
    """The configuration with `auto` decided early, where the devices compiled for have no kernels.

    The program is the same without it. But `auto` traces kernels for whichever platform is to come, and importing
    Pallas and tracing them takes a training step half a second.
    """
    early = config.kernel == "auto" and all(device.platform != "gpu" for device in devices)
    return dataclasses.replace(config, kernel="xla") if early else config
