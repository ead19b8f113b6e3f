"""The public operations on the residual state, differentiable in every argument: `rewrite` and `rewrite_and_read`.

Backward keeps the arguments and makes the rest again: nothing of the state's size besides X itself is saved. The
reversible forms save not even that (design 2.2): backward is given X' and makes X again. X' comes to it as the
cotangent of a second state, the shadow, which forward hands through untouched.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.layout import TokenAxes
from pallas_kernels.rewrite import shapes, xla

F32 = jnp.float32

State = Float[Array, "*tokens channels width"]
Branch = Float[Array, "*tokens width"]
Value = Float[Array, "*tokens channels"]
Gate = Float[Array, "*tokens"]
Weights = Float[Array, "channels width"]


def rewrite(
    state: State,
    branch: Branch,
    value: Value,
    gate: Gate,
    *,
    epsilon: float = 1e-5,
    erase: bool = True,
    implementation: Implementation = "auto",
    token_axes: TokenAxes = None,
) -> State:
    """Edits the residual state along one direction: X' = X + β k (vᵀ − kᵀX), k = h / sqrt(‖h‖² + ε²) (paper eq. 2.2).

    Reverse-mode derivatives of first order; under `jax.checkpoint` on a CPU only with `xla`. ‖h‖² is taken in float32:
    it has to be below 3e38, and where h may be 0, ε above 1e-19.

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
    return _call("rewrite", (state, branch, value, gate), (), epsilon, erase, implementation, token_axes)


def rewrite_and_read(
    state: State,
    branch: Branch,
    value: Value,
    gate: Gate,
    weights: Weights,
    *,
    epsilon: float = 1e-5,
    erase: bool = True,
    implementation: Implementation = "auto",
    token_axes: TokenAxes = None,
) -> tuple[State, Branch]:
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


def reversible_rewrite(
    state: State,
    shadow: State,
    branch: Branch,
    value: Value,
    gate: Gate,
    *,
    epsilon: float = 1e-5,
    erase: bool = True,
    implementation: Implementation = "auto",
    token_axes: TokenAxes = None,
) -> tuple[State, State]:
    """`rewrite` that keeps no state for backward: (X, S) → (X', S).

    Args:
        state: X, the residual state.
        shadow: S, of X's shape and dtype. Its values do not matter. Its cotangent has to be X' when backward begins,
            and is X when it ends: end a stack of these operations with one that gives the last X' as cotangent of S.
        branch, value, gate, epsilon, erase, implementation, token_axes: as in `rewrite`.

    Returns:
        X' and S.

    Raises:
        ValueError: as `rewrite`.
    """
    arrays = (state, branch, value, gate)
    return _call("reversible_rewrite", arrays, (), epsilon, erase, implementation, token_axes, shadow=shadow)


def reversible_rewrite_and_read(
    state: State,
    shadow: State,
    branch: Branch,
    value: Value,
    gate: Gate,
    weights: Weights,
    *,
    epsilon: float = 1e-5,
    erase: bool = True,
    implementation: Implementation = "auto",
    token_axes: TokenAxes = None,
) -> tuple[State, Branch, State]:
    """`rewrite_and_read` that keeps no state for backward: (X, S) → (X', x, S).

    Args:
        state, branch, value, gate, weights, epsilon, erase, implementation, token_axes: as in `rewrite_and_read`.
        shadow: S, as in `reversible_rewrite`.

    Returns:
        X', x and S.

    Raises:
        ValueError: as `rewrite_and_read`.
    """
    arrays = (state, branch, value, gate)
    return _call(
        "reversible_rewrite_and_read", arrays, (weights,), epsilon, erase, implementation, token_axes, shadow=shadow
    )


def _call(operation, arrays, weights, epsilon, erase, implementation, token_axes, shadow=None):
    """Any of the operations: `weights` holds the reader's, or nothing."""
    epsilon = dispatch.number("epsilon", epsilon)
    tokens = dict(zip(("state", "branch", "value", "gate"), arrays, strict=True))
    shared = dict(zip(("weights",), weights, strict=False))
    if operation.startswith("reversible"):
        tokens["shadow"] = shadow
    tokens, shared = dispatch.floating(tokens), dispatch.floating(shared)
    _check_shapes(**tokens, **shared)
    reason = shapes.unsupported(tokens["state"].shape, tokens["state"].dtype, tokens["branch"].dtype)
    whole = ("channels", "width")
    plan, placed, weights = dispatch.plan(operation, implementation, token_axes, tokens, shared, whole, reason)
    call = _Call(epsilon, erase, plan)
    if "shadow" not in tokens:
        return _run(placed, weights, call)
    *arrays, shadow = placed
    return _run_reversible(tuple(arrays), shadow, weights, call)


def _check_shapes(state, branch, value, gate, weights=None, shadow=None):
    if state.ndim < 2 or 0 in state.shape[-2:]:
        raise ValueError(f"state has shape {state.shape}, but needs (…, channels, width), both at least 1")
    *tokens, channels, width = state.shape
    expected = {
        "branch": (branch, (*tokens, width)),
        "value": (value, (*tokens, channels)),
        "gate": (gate, tuple(tokens)),
        "weights": (weights, (channels, width)),
        "shadow": (shadow, state.shape),
    }
    for name, (array, shape) in expected.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, but a state of shape {state.shape} needs {shape}")
    if shadow is not None and shadow.dtype != state.dtype:
        raise ValueError(f"shadow has dtype {shadow.dtype}, but the state has {state.dtype}")


@functools.cache
def _kernels():
    """The kernels of both passes. Under jit, so that calls that are alike are traced, and lowered, once."""
    from pallas_kernels.rewrite import mosaic_gpu  # imports Pallas: a third of a second, for those who need it

    static = ("epsilon", "erase", "interpret")
    forward = jax.jit(mosaic_gpu.forward, static_argnames=(*static, "with_discrepancy"))
    return forward, jax.jit(mosaic_gpu.backward, static_argnames=(*static, "reverse"))


@dataclasses.dataclass(frozen=True)
class _Call:
    """What one call fixes for its forward and its backward pass."""

    epsilon: float
    erase: bool
    plan: dispatch.Plan

    def forward(self, arrays, weights, with_discrepancy=False):
        """X', x where there are weights, w if asked for. `arrays` are X, h, v and β; `weights` holds a, or nothing."""
        options = {"epsilon": self.epsilon, "erase": self.erase, "with_discrepancy": with_discrepancy}

        def pallas(*arguments, interpret):
            forward, _ = _kernels()
            return forward(*arguments, **options, interpret=interpret), ()

        def fallback(*arguments):
            return xla.forward(*arguments, **options), ()

        outputs, _ = self.plan.run(pallas, fallback, arrays, weights)
        return outputs

    def backward(self, arrays, weights, cotangents, reverse=False):
        """The cotangents of `arrays`, and of `weights`; with `reverse` (`arrays` are X', h, w, β) X before them."""
        options = {"epsilon": self.epsilon, "erase": self.erase, "reverse": reverse}

        def split(run, X, h, v, β, d_new, d_read=None, a=None):
            gradients = run(X, h, v, β, a, d_new, d_read, **options)
            end = len(gradients) - len(weights)
            dtypes = [X.dtype] * reverse + [X.dtype, h.dtype, v.dtype, β.dtype]
            tokens = tuple(g.astype(dtype) for g, dtype in zip(gradients[:end], dtypes, strict=True))
            return tokens, tuple(g.astype(w.dtype) for g, w in zip(gradients[end:], weights, strict=True))

        def pallas(*arguments, interpret):
            _, backward = _kernels()
            return split(functools.partial(backward, interpret=interpret), *arguments)

        return self.plan.run(pallas, functools.partial(split, xla.backward), (*arrays, *cotangents), weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _run(arrays, weights, call):
    outputs = call.forward(arrays, weights)
    return outputs if weights else outputs[0]


def _forward(arrays, weights, call):
    return _run(arrays, weights, call), (arrays, weights)


def _backward(call, saved, cotangents):
    arrays, weights = saved
    return call.backward(arrays, weights, cotangents if weights else (cotangents,))


_run.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _run_reversible(arrays, shadow, weights, call):
    return (*call.forward(arrays, weights), shadow)


def _reversible_forward(arrays, shadow, weights, call):
    *outputs, w = call.forward(arrays, weights, with_discrepancy=True)
    _, h, _, β = arrays
    dtype = jnp.zeros((), arrays[2].dtype)  # of v, whose cotangent is to come
    return (*outputs, shadow), (h, w, β, weights, dtype)


def _reversible_backward(call, saved, cotangents):
    h, w, β, weights, dtype = saved
    *cotangents, new_state = cotangents  # the shadow's is the state after this rewrite
    (state, dX, dh, dv, dβ), d_weights = call.backward((new_state, h, w, β), weights, cotangents, reverse=True)
    return (dX, dh, dv.astype(dtype.dtype), dβ), state, d_weights


_run_reversible.defvjp(_reversible_forward, _reversible_backward)
