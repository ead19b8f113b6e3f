"""The custom calls of a compiled program that are understood: what each moves, and its FLOPs."""

from collections.abc import Mapping
import math
from typing import Any

from pallas_kernels.hopper.accesses import Accesses
from pallas_kernels.hopper.program import Array, Computation, Instruction, leaves
from pallas_kernels.traffic import traffic_of_kernels

# By the name of a kernel's body and the types of its operands and results: what one call moves.
KernelKey = tuple[str, tuple[str, ...], tuple[str, ...]]
Kernels = Mapping[KernelKey, Accesses]

_MOSAIC = "mosaic_gpu"
_GEMM = ("__cublas$gemm", "__cublas$lt$matmul")
_ATTENTION = "__cudnn$fmha"
_SCRATCH = ("u8", "s8")  # bytes that a library works in; of no interest here, as they stay small or in the cache


class UnknownCustomCall(ValueError):
    """A program calls something whose bytes nobody has taught this package to count."""


def known_kernels(jaxpr: Any) -> dict[KernelKey, Accesses]:
    """What each Mosaic GPU kernel of a function moves, by its own copies, to be found again in the compiled program.

    Args:
        jaxpr: of the function, such as `jax.jit(function).trace(...).jaxpr`.

    Raises:
        ValueError: two kernels that move different bytes have the same name and types.
    """
    known: dict[KernelKey, Accesses] = {}
    for equation, loaded, stored in traffic_of_kernels(jaxpr):
        operands = tuple(str(Array.of(variable.aval)) for variable in equation.invars)
        key = equation.params["name"], operands, tuple(str(Array.of(aval)) for aval in equation.params["out_avals"])
        if known.setdefault(key, Accesses(loaded, stored)) != Accesses(loaded, stored):
            raise ValueError(f"two kernels {key[0]!r} of the same types move different bytes, so which is which?")
    return known


def kind(call: Instruction) -> str:
    """What a call is, for people: `kernel NAME`, `attention` or `matrix products`.

    Raises:
        UnknownCustomCall: it is none of these.
    """
    if call.target.startswith(_MOSAIC):
        return f"kernel {kernel_name(call)}"
    if call.target.startswith(_ATTENTION):
        return "attention"
    if call.target.startswith(_GEMM):
        return "matrix products"
    raise UnknownCustomCall(f"the program calls {call.target!r} ({call.name}), whose bytes are not known")


def kernel_name(call: Instruction) -> str:
    """Of a Mosaic GPU call: the name of the kernel's body."""
    path = call.path  # …, name, mpmd_map: the last part is the primitive
    return path[-2] if len(path) > 1 else "".join(path[-1:])


def call_accesses(computation: Computation, call: Instruction, kernels: Kernels) -> Accesses:
    """What one call moves: a kernel its own copies, a library's function its operands and results once.

    Raises:
        UnknownCustomCall: the call, or the kernel, is not known.
    """
    kind(call)
    operands = [leaf for name in call.operands for leaf in leaves(computation.by_name[name].shape)]
    results = leaves(call.shape)
    if not call.target.startswith(_MOSAIC):
        results = [results[0], *(result for result in results[1:] if result.dtype not in _SCRATCH)]
        return Accesses(sum(leaf.bytes for leaf in operands), sum(leaf.bytes for leaf in results))
    key = (kernel_name(call), tuple(map(str, operands)), tuple(map(str, results)))
    if key not in kernels:
        raise UnknownCustomCall(f"the program calls the kernel {key[0]!r} ({', '.join(key[1])}), which was not counted")
    return kernels[key]


def call_flops(computation: Computation, call: Instruction) -> int:
    """FLOPs of a call's matrix products, a multiply-add counting as two; 0 for a kernel, which has none.

    Flash attention: two products forward and five backward, of half the scores where a causal mask leaves half.
    """
    if call.target.startswith(_GEMM):
        dimensions = call.backend_config()["gemm_backend_config"]["dot_dimension_numbers"]
        left = computation.by_name[call.operands[0]].shape
        contracted = [left.sizes[int(axis)] for axis in dimensions["lhs_contracting_dimensions"]]
        return 2 * leaves(call.shape)[0].elements * math.prod(contracted)
    if call.target.startswith(_ATTENTION):
        config = call.backend_config()["cudnn_fmha_backend_config"]
        scores = math.prod(int(size) for size in config["intermediate_tensor_shape"]["dimensions"])
        head_dim = computation.by_name[call.operands[0]].shape.sizes[-1]
        products = 5 if call.target.endswith("Backward") else 2
        return products * 2 * scores * head_dim // (2 if config["mask_type"] == "CAUSAL" else 1)
    return 0


def call_type(computation: Computation, call: Instruction) -> Array:
    """The type of a call's first operand, which says how fast its products are."""
    return leaves(computation.by_name[call.operands[0]].shape)[0]
