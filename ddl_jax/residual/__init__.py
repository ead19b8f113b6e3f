"""The residual stream: how sublayers read the residual state and write into it."""

from ddl_jax.residual.stream import Connection, DeltaStream
from pallas_kernels.layout import TokenAxes

__all__ = ["Connection", "DeltaStream", "TokenAxes"]
