"""`ddl plan`: what a run will need, before it runs: memory, bytes, FLOPs and time at the H200's limits."""

from ddl_jax.plan.command import main

__all__ = ["main"]
