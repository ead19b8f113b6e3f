"""An operation with a kernel of a few lines, to test `pallas_kernels.dispatch` with: Y = g w ⊙ X.

State X (tokens…, V, d), gate g (tokens…), weights w (V, d); the gradient of w is a sum over tokens, made from one
partial sum per program of the kernel, as the real operations do.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch

F32 = jnp.float32
LANES = 128


def scale(state, gate, weights, *, implementation="auto", token_axes=None, whole=("channels", "width")):
    """The operation, as the public operations are built."""
    width = state.shape[-1]
    reason = f"width {width} is not a multiple of {LANES}" if width % LANES else None
    tokens = {"state": state, "gate": gate}
    plan, arrays, shared = dispatch.plan(
        "scale", implementation, token_axes, tokens, {"weights": weights}, whole, reason
    )
    return _scale(*arrays, *shared, plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _scale(state, gate, weights, plan):
    ((new_state,), _) = plan.run(_kernel, _xla, (state, gate), (weights,))
    return new_state


def _forward(state, gate, weights, plan):
    return _scale(state, gate, weights, plan), (state, gate, weights)


def _backward(plan, saved, d_new):
    state, gate, weights = saved
    (d_state, d_gate), (d_weights,) = plan.run(_kernel_backward, _xla_backward, (state, gate, d_new), (weights,))
    return d_state, d_gate, d_weights


_scale.defvjp(_forward, _backward)


def _xla(X, g, w):
    return ((g[..., None, None] * w * X).astype(X.dtype),), ()


def _xla_backward(X, g, dY, w):
    product = X.astype(F32) * dY
    dw = jnp.einsum("...,...vd->vd", g, product, precision="highest")
    return ((g[..., None, None] * w * dY).astype(X.dtype), jnp.sum(w * product, axis=(-2, -1))), (dw,)


@functools.partial(jax.jit, static_argnames="interpret")  # alike calls are traced and lowered once
def _kernel(X, g, w, interpret):
    def scale_kernel(g, w, X, Y):
        Y[...] = (g * w * X[...].astype(F32)).astype(Y.dtype)

    return tuple(_launch(scale_kernel, (X,), g, w, (X.dtype,), interpret)), ()


@functools.partial(jax.jit, static_argnames="interpret")
def _kernel_backward(X, g, dY, w, interpret):
    def scale_backward_kernel(g, w, X, dY, dX, partial):
        dX[...] = (g * w * dY[...].astype(F32)).astype(dX.dtype)
        partial[...] = X[...].astype(F32) * dY[...].astype(F32)

    dX, partial = _launch(scale_backward_kernel, (X, dY), g, w, (X.dtype, F32), interpret)
    return (dX, jnp.sum(w * partial, axis=(-2, -1))), (jnp.sum(g[:, None, None] * partial, axis=0),)


def _launch(body, states, g, w, dtypes, interpret):
    """One program per token runs `body(g, w, *token of each state, *token of each output)`."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    tokens, channels, width = states[0].shape
    tile = (channels * width // LANES, LANES)
    few = len(states)

    def kernel(g, w, *references):
        sources, references = references[:few], references[few:]
        targets, (*buffers, barrier) = references[: len(dtypes)], references[len(dtypes) :]
        token = jax.lax.axis_index("token")
        for source, buffer in zip(sources, buffers, strict=False):
            plgpu.copy_gmem_to_smem(source.at[token], buffer, barrier)
        plgpu.barrier_wait(barrier)
        body(g[token], w[...], *buffers)
        plgpu.commit_smem()
        for buffer, target in zip(buffers[few:], targets, strict=True):
            plgpu.copy_smem_to_gmem(buffer, target.at[token])
        plgpu.wait_smem_to_gmem(0)

    kernel.__name__ = body.__name__  # what the compiled program calls it
    outputs = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((tokens, *tile), dtype) for dtype in dtypes],
        grid=(tokens,),
        grid_names=("token",),
        scratch_types=[
            *(plgpu.SMEM(tile, dtype) for dtype in (*(state.dtype for state in states), *dtypes)),
            plgpu.Barrier(num_arrivals=few),
        ],
        **({} if interpret is None else {"interpret": interpret}),
    )(g, w.reshape(tile), *(state.reshape(tokens, *tile) for state in states))
    return [output.reshape(tokens, channels, width) for output in outputs]
