"""What the `auto` settings of a model come to on given devices: dtypes, attention, the stream's kernels."""

from collections.abc import Sequence
import dataclasses

import jax

from ddl_jax.config import TransformerConfig
from ddl_jax.errors import InputError
from ddl_jax.residual import kernels


def decided(config: TransformerConfig, devices: Sequence[jax.Device]) -> TransformerConfig:
    """The configuration with what the devices decide decided. The stream's kernels may stay open until lowering.

    Raises:
        InputError: the configuration asks for cuDNN's attention, which cannot run on these devices.
    """
    config = with_dtypes(config, devices)
    attention = "cudnn" if explain_attention(config, devices) == "cuDNN" else "xla"
    return dataclasses.replace(config, attention=attention, residual=kernels.decided(config.residual, devices))


def widest() -> str:
    """The dtype that JAX gives numbers of which none is asked for: float32, or with `jax_enable_x64` float64."""
    return jax.dtypes.canonicalize_dtype(float).name


def dtype(platform: str) -> str:
    """What the dtype `auto` is on a platform."""
    return "bfloat16" if platform == "gpu" else widest()


def with_dtypes(config: TransformerConfig, devices: Sequence[jax.Device]) -> TransformerConfig:
    """The configuration with its dtypes decided."""
    default = dtype(devices[0].platform)
    names = {field: getattr(config, field) for field in ("compute_dtype", "state_dtype")}
    return dataclasses.replace(config, **{field: default if name == "auto" else name for field, name in names.items()})


def explain_attention(config: TransformerConfig, devices: Sequence[jax.Device], path: str = "model") -> str:
    """Which implementation of attention runs, and why, for a start-up line.

    Args:
        config: resolved, its dtypes decided.
        devices: those compiled for.
        path: of the configuration, for the message.

    Returns:
        Such as "cuDNN", "XLA" or "XLA: no GPU here".

    Raises:
        InputError: `cudnn`, and cuDNN cannot run.
    """
    if config.attention == "xla":
        return "XLA"
    reason = _without_cudnn(config, devices[0])
    if reason is None:
        return "cuDNN"
    if config.attention == "cudnn":
        raise InputError(f"{path}.attention 'cudnn' cannot run: {reason}; use 'auto'")
    return f"XLA: {reason}"


def _without_cudnn(config: TransformerConfig, device: jax.Device) -> str | None:
    """Why cuDNN's flash attention cannot run on `device`."""
    if device.platform != "gpu":
        return "no GPU here"
    if "NVIDIA" not in device.device_kind:
        return f"{device.device_kind} is not a GPU of NVIDIA's"
    major = int(str(device.compute_capability).split(".")[0])
    if major < 8:
        return f"{device.device_kind} is older than cuDNN's flash attention"
    if config.compute_dtype != "bfloat16":
        return f"cuDNN's flash attention takes bfloat16, not {config.compute_dtype}"
    longest = 256 if major == 9 else 128
    if config.head_dim % 8 or config.head_dim > longest:
        return f"head_dim {config.head_dim} is not a multiple of 8 up to {longest}"
    return None
