"""The public operations on the residual state: `rewrite` and `rewrite_and_read`, differentiable in every argument.

Backward keeps the arguments and makes the rest again: nothing of the state's size besides X itself is saved.
"""

import functools
from typing import Literal

import jax
from jaxtyping import Array, Float

from pallas_kernels.rewrite import xla

Implementation = Literal["auto", "xla"]


def rewrite(
    state: Float[Array, "*tokens channels width"],
    branch: Float[Array, "*tokens width"],
    value: Float[Array, "*tokens channels"],
    gate: Float[Array, "*tokens"],
    *,
    epsilon: float = 1e-5,
    erase: bool = True,
    implementation: Implementation = "auto",
) -> Float[Array, "*tokens channels width"]:
    """Edits the residual state along one direction: X' = X + β k (vᵀ − kᵀX), k = h / sqrt(‖h‖² + ε²) (paper eq. 2.2).

    Args:
        state: X, the residual state.
        branch: h, the unnormalised direction.
        value: v, the target read-out of each channel.
        gate: β, between 0 and 2.
        epsilon: ε, the guard; h = 0 leaves the state as it is.
        erase: False is the write-only control X' = X + β k vᵀ.
        implementation: `auto` or `xla`.

    Returns:
        X', in the state's dtype; dot products are taken in float32.

    Raises:
        ValueError: shapes that do not belong together, or an unknown implementation.
    """
    _check(state, branch, value, gate, None, implementation)
    return _rewrite(state, branch, value, gate, epsilon, erase)


def rewrite_and_read(
    state: Float[Array, "*tokens channels width"],
    branch: Float[Array, "*tokens width"],
    value: Float[Array, "*tokens channels"],
    gate: Float[Array, "*tokens"],
    weights: Float[Array, "channels width"],
    *,
    epsilon: float = 1e-5,
    erase: bool = True,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "*tokens channels width"], Float[Array, "*tokens width"]]:
    """`rewrite`, and the next channel read x_i = Σ_j a_ji X'_ji, in one pass over the state.

    Args:
        state: X, the residual state.
        branch: h, the unnormalised direction.
        value: v, the target read-out of each channel.
        gate: β, between 0 and 2.
        weights: a, the weights of the reader that follows, one per channel and feature.
        epsilon: ε, the guard.
        erase: False is the write-only control.
        implementation: `auto` or `xla`.

    Returns:
        X' and x, both in the state's dtype.

    Raises:
        ValueError: shapes that do not belong together, or an unknown implementation.
    """
    _check(state, branch, value, gate, weights, implementation)
    return _rewrite_and_read(state, branch, value, gate, weights, epsilon, erase)


def _check(state, branch, value, gate, weights, implementation):
    if implementation not in ("auto", "xla"):
        raise ValueError(f"implementation {implementation!r} is not known; use 'auto' or 'xla'")
    *tokens, channels, width = state.shape
    expected = {
        "branch": (branch, (*tokens, width)),
        "value": (value, (*tokens, channels)),
        "gate": (gate, tuple(tokens)),
    }
    if weights is not None:
        expected["weights"] = (weights, (channels, width))
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, but a state of shape {state.shape} needs {shape}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _rewrite(state, branch, value, gate, epsilon, erase):
    return xla.rewrite(state, branch, value, gate, epsilon, erase)


def _rewrite_forward(state, branch, value, gate, epsilon, erase):
    return _rewrite(state, branch, value, gate, epsilon, erase), (state, branch, value, gate)


def _rewrite_backward(epsilon, erase, saved, d_new):
    return xla.rewrite_and_read_backward(*saved, None, d_new, None, epsilon, erase)[:4]


_rewrite.defvjp(_rewrite_forward, _rewrite_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _rewrite_and_read(state, branch, value, gate, weights, epsilon, erase):
    return xla.rewrite_and_read(state, branch, value, gate, weights, epsilon, erase)


def _rewrite_and_read_forward(state, branch, value, gate, weights, epsilon, erase):
    outputs = _rewrite_and_read(state, branch, value, gate, weights, epsilon, erase)
    return outputs, (state, branch, value, gate, weights)


def _rewrite_and_read_backward(epsilon, erase, saved, cotangents):
    return xla.rewrite_and_read_backward(*saved, *cotangents, epsilon, erase)


_rewrite_and_read.defvjp(_rewrite_and_read_forward, _rewrite_and_read_backward)
