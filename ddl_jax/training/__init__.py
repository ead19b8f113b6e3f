"""Training: the step as a pure function, and the loop that never loses work."""

from ddl_jax.training.loop import train

__all__ = ["train"]
