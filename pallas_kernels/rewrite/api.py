"""The public operations on the residual state: `rewrite` and `rewrite_and_read`, differentiable in every argument.

The backward pass is written out (design 2), so that it keeps X, h, v and β and nothing of the state's size besides:

    g = kᵀD (V);  dX = D − β k gᵀ;  dv = β g;  dβ = g·w;  da = Σ_tokens dx ⊙ X'
    dk = β (D w − X g);  dh = (dk − k (k·dk)) / sqrt(‖h‖² + ε²)

where D is the total cotangent of X': D = dX' + a ⊙ dx. Without erase the terms −X g and −β k gᵀ are absent.
"""

import functools
from typing import Literal

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.rewrite import reference

F32 = jnp.float32
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
    return reference.rewrite(state, branch, value, gate, epsilon=epsilon, erase=erase)


def _rewrite_forward(state, branch, value, gate, epsilon, erase):
    return _rewrite(state, branch, value, gate, epsilon, erase), (state, branch, value, gate)


def _rewrite_backward(epsilon, erase, saved, d_new):
    return _input_cotangents(*saved, d_new.astype(F32), epsilon, erase)


_rewrite.defvjp(_rewrite_forward, _rewrite_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _rewrite_and_read(state, branch, value, gate, weights, epsilon, erase):
    return reference.rewrite_and_read(state, branch, value, gate, weights, epsilon=epsilon, erase=erase)


def _rewrite_and_read_forward(state, branch, value, gate, weights, epsilon, erase):
    outputs = _rewrite_and_read(state, branch, value, gate, weights, epsilon, erase)
    return outputs, (state, branch, value, gate, weights)


def _rewrite_and_read_backward(epsilon, erase, saved, cotangents):
    state, branch, value, gate, weights = saved
    d_new, d_read = cotangents[0].astype(F32), cotangents[1].astype(F32)
    total = d_new + weights.astype(F32) * d_read[..., None, :]
    inputs = _input_cotangents(state, branch, value, gate, total, epsilon, erase)
    # X' is made again from X rather than kept: the same pass over X serves both.
    new_state = reference.rewrite(state, branch, value, gate, epsilon=epsilon, erase=erase).astype(F32)
    tokens = tuple(range(gate.ndim))
    d_weights = jnp.sum(d_read[..., None, :] * new_state, axis=tokens).astype(weights.dtype)
    return *inputs, d_weights


_rewrite_and_read.defvjp(_rewrite_and_read_forward, _rewrite_and_read_backward)


def _input_cotangents(state, branch, value, gate, D, epsilon, erase):
    """dX, dh, dv and dβ from D, the total cotangent of X'; letters as in the module's docstring."""
    X, h, v, β = state.astype(F32), branch.astype(F32), value.astype(F32), gate.astype(F32)[..., None]
    inverse_norm = lax.rsqrt(jnp.sum(h * h, axis=-1, keepdims=True) + epsilon**2)
    k = h * inverse_norm
    g = jnp.sum(k[..., None, :] * D, axis=-1)
    w = v - jnp.sum(k[..., None, :] * X, axis=-1) if erase else v
    dX = D - (β * g)[..., None] * k[..., None, :] if erase else D
    dk = β * jnp.sum(D * w[..., None] - X * g[..., None] if erase else D * w[..., None], axis=-2)
    dh = inverse_norm * (dk - k * jnp.sum(k * dk, axis=-1, keepdims=True))
    dβ = jnp.sum(g * w, axis=-1)
    return dX.astype(state.dtype), dh.astype(branch.dtype), (β * g).astype(value.dtype), dβ.astype(gate.dtype)
