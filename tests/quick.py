"""Compiling fast, for functions that run a few times on a few numbers."""

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
