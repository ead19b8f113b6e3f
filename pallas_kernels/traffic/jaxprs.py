"""What the equations of a kernel can do, told from their types."""

from collections.abc import Iterator
from typing import Any

from pallas_kernels.traffic.refs import is_global, is_ref
from pallas_kernels.traffic.scalars import is_index

# Have effects, and move nothing between global memory and the chip.
HARMLESS = frozenset({
    "commit_smem", "commit_group", "wait_smem_to_gmem", "set_max_registers", "layout_cast", "optimization_barrier",
    "wgmma", "wgmma_ref", "wgmma_wait", "wgmma_accumulator_deref", "debug_print", "print_layout",
})  # fmt: skip
CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "custom_jvp_call"})


def name_of(equation) -> str:
    """The name of an equation's primitive."""
    return equation.primitive.name.removesuffix("_p")  # jax 0.11 calls some so: set_max_registers_p


def inner_jaxprs(params: dict) -> Iterator[Any]:
    """The jaxprs among an equation's parameters."""
    for value in params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            one = getattr(one, "jaxpr", one)
            if hasattr(one, "eqns"):
                yield one


def matters(equation) -> bool:
    """Whether an equation can have a scalar integer, a buffer or an effect in it; the others are not looked at."""
    return (
        bool(equation.effects)
        or any(is_ref(var.aval) for var in equation.invars)
        or any(is_index(var.aval) for var in equation.outvars)
    )


def counts(jaxpr) -> bool:
    """Whether a jaxpr may move bytes or touch a barrier."""
    for equation in jaxpr.eqns:
        inner = list(inner_jaxprs(equation.params))
        refs = [var.aval for var in equation.invars if is_ref(var.aval)]
        if not inner and (equation.effects or refs) and name_of(equation) not in HARMLESS:
            shared_only = not any(map(is_global, refs))
            if not (shared_only and name_of(equation) in ("get", "load", "swap", "store", "addupdate")):
                return True
        if any(counts(body) for body in inner):
            return True
    return False
