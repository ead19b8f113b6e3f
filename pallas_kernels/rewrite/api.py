"""The public operations on the residual state: `rewrite` and `rewrite_and_read`, differentiable in every argument.

Backward keeps the arguments and makes the rest again: nothing of the state's size besides X itself is saved.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.layout import TokenAxes
from pallas_kernels.rewrite import shapes, xla

F32 = jnp.float32


def rewrite(
    state: Float[Array, "*tokens channels width"],
    branch: Float[Array, "*tokens width"],
    value: Float[Array, "*tokens channels"],
    gate: Float[Array, "*tokens"],
    *,
    epsilon: float = 1e-5,
    erase: bool = True,
    implementation: Implementation = "auto",
    token_axes: TokenAxes = None,
) -> Float[Array, "*tokens channels width"]:
    """Edits the residual state along one direction: X' = X + β k (vᵀ − kᵀX), k = h / sqrt(‖h‖² + ε²) (paper eq. 2.2).

    Args:
        state: X, the residual state.
        branch: h, the unnormalised direction.
        value: v, the target read-out of each channel.
        gate: β, between 0 and 2.
        epsilon: ε, the guard; h = 0 leaves the state as it is.
        erase: False is the write-only control X' = X + β k vᵀ.
        implementation: `xla`; `pallas`, which a CPU interprets; or `auto`: Pallas where the program is compiled for a
            Hopper GPU and the kernel takes the arrays, else XLA.
        token_axes: the mesh axes that divide the first token axis, or a `PartitionSpec` for each token axis. The kernel
            needs it on a mesh of several devices, except where the axes are Explicit or inside `jax.shard_map`.

    Returns:
        X', in the state's dtype; dot products are taken in float32.

    Raises:
        ValueError: shapes that do not belong together; an unknown implementation; `pallas` for arrays that the kernel
            cannot take, or divided over a mesh in a way that is not known or that it cannot follow.
    """
    (new_state,) = _call("rewrite", (state, branch, value, gate), (), epsilon, erase, implementation, token_axes)
    return new_state


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
    token_axes: TokenAxes = None,
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
        implementation: `xla`; `pallas`, which a CPU interprets; or `auto`: Pallas where the program is compiled for a
            Hopper GPU and the kernel takes the arrays, else XLA.
        token_axes: the mesh axes that divide the first token axis, or a `PartitionSpec` for each token axis. The kernel
            needs it on a mesh of several devices, except where the axes are Explicit or inside `jax.shard_map`.

    Returns:
        X' and x, both in the state's dtype.

    Raises:
        ValueError: shapes that do not belong together; an unknown implementation; `pallas` for arrays that the kernel
            cannot take, or divided over a mesh in a way that is not known or that it cannot follow.
    """
    arrays = (state, branch, value, gate)
    return _call("rewrite_and_read", arrays, (weights,), epsilon, erase, implementation, token_axes)


def _call(operation, arrays, weights, epsilon, erase, implementation, token_axes):
    """Either operation: `weights` holds the reader's, or nothing."""
    tokens = dict(zip(("state", "branch", "value", "gate"), arrays, strict=True))
    shared = dict(zip(("weights",), weights, strict=False))
    _check_shapes(**tokens, **shared)
    state = tokens["state"]
    reason = shapes.unsupported(state.shape, state.dtype)
    whole = ("channels", "width")
    plan, arrays, weights = dispatch.plan(operation, implementation, token_axes, tokens, shared, whole, reason)
    return _run(arrays, weights, epsilon, erase, plan)


def _check_shapes(state, branch, value, gate, weights=None):
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


@functools.cache
def _kernels():
    """The kernels of both passes. Under jit, so that calls that are alike are traced, and lowered, once."""
    from pallas_kernels.rewrite import mosaic_gpu  # imports Pallas: a third of a second, for those who need it

    static = ("epsilon", "erase", "interpret")
    return jax.jit(mosaic_gpu.rewrite, static_argnames=static), jax.jit(mosaic_gpu.backward, static_argnames=static)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _run(arrays, weights, epsilon, erase, plan):
    """X', and x where there are weights. `arrays` are X, h, v and β; `weights` holds a, or nothing."""

    def pallas(X, h, v, β, *a, interpret):
        a = a[0].astype(F32) if a else None
        forward, _ = _kernels()
        outputs = forward(X, h, v.astype(F32), β.astype(F32), a, epsilon=epsilon, erase=erase, interpret=interpret)
        return outputs if weights else outputs[:1], ()

    def fallback(*arguments):
        if weights:
            return xla.rewrite_and_read(*arguments, epsilon, erase), ()
        return (xla.rewrite(*arguments, epsilon, erase),), ()

    outputs, _ = plan.run(pallas, fallback, arrays, weights)
    return outputs


def _forward(arrays, weights, epsilon, erase, plan):
    return _run(arrays, weights, epsilon, erase, plan), (arrays, weights)


def _backward(epsilon, erase, plan, saved, cotangents):
    arrays, weights = saved

    def pallas(X, h, v, β, d_new, *reading, interpret):
        d_read, a = (reading[0], reading[1].astype(F32)) if reading else (None, None)
        _, backward = _kernels()
        *gradients, d_a = backward(
            X, h, v.astype(F32), β.astype(F32), a, d_new, d_read, epsilon=epsilon, erase=erase, interpret=interpret
        )
        gradients = tuple(g.astype(array.dtype) for g, array in zip(gradients, arrays, strict=True))
        return gradients, tuple(d_a.astype(w.dtype) for w in weights)

    def fallback(X, h, v, β, d_new, *reading):
        d_read, a = reading or (None, None)
        *gradients, d_a = xla.rewrite_and_read_backward(X, h, v, β, a, d_new, d_read, epsilon, erase)
        return tuple(gradients), (d_a,) if weights else ()

    return plan.run(pallas, fallback, (*arrays, *cotangents), weights)


_run.defvjp(_forward, _backward)
