"""The public operation `token_read`, differentiable in both arguments. Backward keeps the arguments alone."""

import functools

import jax
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.layout import TokenAxes
from pallas_kernels.token_read import shapes, xla


def token_read(
    state: Float[Array, "*batch tokens channels width"],
    weights: Float[Array, "taps channels width"],
    *,
    implementation: Implementation = "auto",
    token_axes: TokenAxes = None,
) -> Float[Array, "*batch tokens width"]:
    """The token reader's view of the residual state: x_i[t] = Σ_s Σ_j a_sji X_ji[t−s], s = 0..K−1 (paper, TC).

    Causal, with zeros before the first token of each sequence. Reverse-mode derivatives of first order.

    Args:
        state: X, the residual state; every leading index is a sequence of its own.
        weights: a, one weight per tap, channel and feature, the pooling over channels multiplied in.
        implementation: `xla`; `pallas`, which a CPU interprets; or `auto`: Pallas where the program is compiled for a
            Hopper GPU and the kernel takes the arrays, else XLA.
        token_axes: the mesh axes that divide the first axis of sequences, or a `PartitionSpec` for each such axis. The
            kernel needs it on a mesh of several devices, except where the axes are Explicit or inside `jax.shard_map`.
            The tokens of a sequence stay together.

    Returns:
        x, in the state's dtype; sums are taken in float32.

    Raises:
        ValueError: shapes that do not belong together; an unknown implementation; `pallas` for arrays that the kernel
            cannot take, or divided over a mesh in a way that is not known or that it cannot follow.
    """
    state, weights = dispatch.floating({"state": state, "weights": weights}).values()
    if state.ndim < 3:
        raise ValueError(f"state has shape {state.shape}, but needs (…, tokens, channels, width)")
    if weights.ndim != 3 or weights.shape[0] == 0 or weights.shape[1:] != state.shape[-2:]:
        needed = f"(taps, {state.shape[-2]}, {state.shape[-1]})"
        raise ValueError(f"weights has shape {weights.shape}, but a state of shape {state.shape} needs {needed}")
    reason = shapes.unsupported(state.shape, state.dtype, weights.shape[0])
    whole = ("tokens", "channels", "width")
    tokens, shared = {"state": state}, {"weights": weights}
    plan, (state,), (weights,) = dispatch.plan("token_read", implementation, token_axes, tokens, shared, whole, reason)
    return _token_read(state, weights, plan)


@functools.cache
def _kernels():
    """The kernels of both passes. Under jit, so that calls that are alike are traced, and lowered, once."""
    from pallas_kernels.token_read import mosaic_gpu  # imports Pallas: a third of a second, for those who need it

    kernels = (mosaic_gpu.token_read, mosaic_gpu.token_read_backward)
    return tuple(jax.jit(kernel, static_argnames="interpret") for kernel in kernels)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _token_read(state, weights, plan):
    def pallas(state, weights, interpret):
        forward, _ = _kernels()
        return (forward(state, weights, interpret=interpret),), ()

    (read,), _ = plan.run(pallas, lambda *arrays: ((xla.token_read(*arrays),), ()), (state,), (weights,))
    return read


def _forward(state, weights, plan):
    return _token_read(state, weights, plan), (state, weights)


def _backward(plan, saved, d_read):
    state, weights = saved

    def pallas(state, d_read, weights, interpret):
        _, backward = _kernels()
        d_state, d_weights = backward(state, weights, d_read, interpret=interpret)
        return (d_state,), (d_weights.astype(weights.dtype),)

    def fallback(state, d_read, weights):
        d_state, d_weights = xla.token_read_backward(state, weights, d_read)
        return (d_state,), (d_weights,)

    (d_state,), (d_weights,) = plan.run(pallas, fallback, (state, d_read), (weights,))
    return d_state, d_weights


_token_read.defvjp(_forward, _backward)
