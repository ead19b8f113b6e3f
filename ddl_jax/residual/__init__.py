"""The residual stream: how sublayers read the residual state and write into it."""

from ddl_jax.residual.stream import Connection, DeltaStream

__all__ = ["Connection", "DeltaStream"]
