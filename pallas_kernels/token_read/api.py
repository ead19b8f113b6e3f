"""The public operation `token_read`, differentiable in both arguments. Backward keeps the arguments alone."""

import functools
import math
from typing import Literal

import jax
from jaxtyping import Array, Float

from pallas_kernels.token_read import shapes, xla

Implementation = Literal["auto", "xla", "pallas"]


def token_read(
    state: Float[Array, "*batch tokens channels width"],
    weights: Float[Array, "taps channels width"],
    *,
    implementation: Implementation = "auto",
    token_axes=None,
) -> Float[Array, "*batch tokens width"]:
    """The token reader's view of the residual state: x_i[t] = Σ_s Σ_j a_sji X_ji[t−s], s = 0..K−1 (paper, TC).

    Causal, with zeros before the first token of each sequence.

    Args:
        state: X, the residual state; every leading index is a sequence of its own.
        weights: a, one weight per tap, channel and feature, the pooling over channels multiplied in.
        implementation: `xla`, `pallas` (on CPU its interpreter) or `auto`, which is `xla`.
        token_axes: mesh axes of the state's leading axes, for the kernels on a mesh; those run on one device so far.

    Returns:
        x, in the state's dtype; sums are taken in float32.

    Raises:
        ValueError: shapes that do not belong together, an unknown implementation, or a state the kernels cannot take
            with `implementation="pallas"`.
        NotImplementedError: `token_axes` with `implementation="pallas"`.
    """
    if implementation not in ("auto", "xla", "pallas"):
        raise ValueError(f"implementation {implementation!r} is not known; use 'auto', 'xla' or 'pallas'")
    if state.ndim < 3:
        raise ValueError(f"state has shape {state.shape}, but needs (…, tokens, channels, width)")
    if weights.ndim != 3 or weights.shape[0] == 0 or weights.shape[1:] != state.shape[-2:]:
        needed = f"(taps, {state.shape[-2]}, {state.shape[-1]})"
        raise ValueError(f"weights has shape {weights.shape}, but a state of shape {state.shape} needs {needed}")
    if implementation == "pallas" and token_axes is not None:
        raise NotImplementedError("token_axes: the kernels of token_read do not run on a mesh yet; use 'xla'")
    if implementation == "pallas" and (reason := shapes.unsupported(state.shape, state.dtype, weights.shape[0])):
        raise ValueError(f"implementation 'pallas' cannot take this state: {reason}; or use 'xla'")
    return _token_read(state, weights, implementation)


def _kernels():
    """The kernels, and how to run them: interpreted on CPU."""
    from pallas_kernels.token_read import mosaic_gpu  # imports Pallas, which XLA's users can do without

    return mosaic_gpu, mosaic_gpu.interpreter() if jax.default_backend() == "cpu" else None


def _flat(array, trailing):
    """All leading axes as one, of sequences."""
    return array.reshape(math.prod(array.shape[:-trailing]), *array.shape[-trailing:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _token_read(state, weights, implementation):
    if implementation != "pallas":
        return xla.token_read(state, weights)
    kernels, interpret = _kernels()
    read = kernels.token_read(_flat(state, 3), weights, interpret=interpret)
    return read.reshape(*state.shape[:-2], state.shape[-1])


def _forward(state, weights, implementation):
    return _token_read(state, weights, implementation), (state, weights)


def _backward(implementation, saved, d_read):
    state, weights = saved
    if implementation != "pallas":
        return xla.token_read_backward(state, weights, d_read)
    kernels, interpret = _kernels()
    d_state, d_weights = kernels.token_read_backward(_flat(state, 3), weights, _flat(d_read, 2), interpret=interpret)
    return d_state.reshape(state.shape), d_weights.astype(weights.dtype)


_token_read.defvjp(_forward, _backward)
