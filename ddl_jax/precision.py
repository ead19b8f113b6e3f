"""The precision in which norms, gates, values, edits and the loss compute."""

from pallas_kernels.precision import at_least_float32

__all__ = ["at_least_float32"]
