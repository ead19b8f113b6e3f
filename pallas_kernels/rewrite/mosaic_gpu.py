"""The rewrite with the next read, and its backward, as Pallas Mosaic GPU kernels for Hopper: one pass over the state.

A block does one token at a time. TMA brings it into a slot of shared memory while earlier tokens are worked on; results
overwrite what they come from, and TMA takes them from there. The sums over the width (‖h‖², hᵀX, in backward hᵀD) are
the only numbers that threads exchange: all else belongs to one feature. They are taken with h in place of
k = h / sqrt(‖h‖² + ε²), so that one exchange is enough; `inverse` is the factor between the two.

Shapes: state X (N, V, d), branch h (N, d), value v (N, V), gate β (N), weights a (V, d); letters as in `reference`.
"""

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.rewrite import shapes
from pallas_kernels.rewrite.block import launch

F32 = jnp.float32


def interpreter(detect_races: bool = True):
    """What `interpret` takes to run a kernel on a CPU."""
    return plgpu.InterpretGPUParams(detect_races=detect_races)


def forward(state, branch, value, gate, weights=None, *, epsilon, erase, with_discrepancy=False, interpret=None):
    """X'; then, given weights, the next read x (N, d); then, if asked for, the discrepancy w (N, V)."""
    tokens, V, _ = state.shape
    reads = weights is not None
    cut = shapes.plan(*state.shape, state.dtype, branch.dtype, reads=reads)

    def body(block, gmem):
        def load(token, slot, barrier):
            plgpu.copy_gmem_to_smem(gmem["X"].at[token, :, block.columns], block.slot("X", slot), barrier)
            plgpu.copy_gmem_to_smem(gmem["h"].at[token, block.columns], block.slot("h", slot), barrier)

        def fetch(token):
            return [gmem["v"][token, j] for j in range(V)], gmem["β"][token]

        def work(token, slot, step, scalars, carry):
            v, β = scalars
            h = block.get(block.slot("h", slot))
            X = []

            def products():
                yield h * h
                for j in range(V):
                    X.append(block.get(block.slot("X", slot, j)))
                    if erase:
                        yield h * X[j]

            total = block.sums(products(), step)
            inverse = lax.rsqrt(total(0) + epsilon**2)
            w = [v[j] - inverse * total(1 + j) for j in range(V)] if erase else v
            x = []
            for j in range(V):
                new = X[j] + h * (β * w[j] * inverse)
                block.put(block.slot("X", slot, j), new)
                if reads:
                    x.append(a[j] * new)
            if reads:
                block.put(block.slot("x", slot), sum(x[1:], x[0]))
            if with_discrepancy:
                block.once(lambda: put_scalars(gmem["w"], token, w))
            return carry

        def store(token, slot):
            new = gmem["X'"].at[token, :, block.columns]
            plgpu.copy_smem_to_gmem(block.slot("X", slot), new, commit_group=not reads)
            if reads:
                plgpu.copy_smem_to_gmem(block.slot("x", slot), gmem["x"].at[token, block.columns])

        block.start(load)
        a = [block.get(gmem["a"].at[j, block.columns], shared=False) for j in range(V)] if reads else []
        block.walk(fetch, work, store, ())

    inputs = {"X": state, "h": branch, "v": value.astype(F32), "β": gate.astype(F32)}
    outputs = {"X'": jax.ShapeDtypeStruct(state.shape, state.dtype)}
    slots, buffers = {"X": ((V,), state.dtype), "h": ((), branch.dtype)}, {}
    if reads:
        inputs["a"] = weights.astype(F32)
        outputs["x"] = jax.ShapeDtypeStruct(branch.shape, state.dtype)
        buffers["x"] = ((), state.dtype)
    if with_discrepancy:
        outputs["w"] = jax.ShapeDtypeStruct((tokens, V), F32)
    name = "rewrite_and_read" if reads else "rewrite"
    rows = shapes.rows(V, backward=False) if erase else 1
    return tuple(
        launch(name, body, cut, tokens, inputs, outputs, slots, buffers, rows=rows, interpret=interpret).values()
    )


def backward(state, branch, value, gate, weights, d_new, d_read, *, epsilon, erase, reverse=False, interpret=None):
    """dX, dh, dv, dβ and, given weights, da: the equations are in `xla.backward`.

    With `reverse`, `state` is X' and `value` is the discrepancy w that forward gave, and X comes back in front:
    X = X' − β k wᵀ, exact without a division (design 2.2).
    """
    tokens, V, width = state.shape
    reads = weights is not None
    cut = shapes.plan(*state.shape, state.dtype, branch.dtype, reads=reads, backward=True, reverse=reverse)

    def body(block, gmem):
        def load(token, slot, barrier):
            plgpu.copy_gmem_to_smem(gmem["X"].at[token, :, block.columns], block.slot("X", slot), barrier)
            plgpu.copy_gmem_to_smem(gmem["dX'"].at[token, :, block.columns], block.slot("D", slot), barrier)
            plgpu.copy_gmem_to_smem(gmem["h"].at[token, block.columns], block.slot("h", slot), barrier)
            if reads:
                plgpu.copy_gmem_to_smem(gmem["dx"].at[token, block.columns], block.slot("dx", slot), barrier)

        def fetch(token):
            return [gmem["v"][token, j] for j in range(V)], gmem["β"][token]

        def work(token, slot, step, scalars, da):
            v, β = scalars
            h = block.get(block.slot("h", slot))
            dx = block.get(block.slot("dx", slot)) if reads else None

            def D_of(j):
                d_new = block.get(block.slot("D", slot, j))
                return d_new + a[j] * dx if reads else d_new

            def X_of(j):
                return block.get(block.slot("X", slot, j))

            D = []

            def products():
                yield h * h
                for j in range(V):
                    D.append(D_of(j))
                    yield h * D[j]
                for j in range(V) if erase else ():
                    yield h * X_of(j)

            total = block.sums(products(), step)
            inverse = lax.rsqrt(total(0) + epsilon**2)
            ρ = total(0) * inverse * inverse

            g = [inverse * total(1 + j) for j in range(V)]
            r = [inverse * total(1 + V + j) for j in range(V)] if erase else None
            if erase and reverse:  # so far r is kᵀX'
                r = [r[j] - β * ρ * v[j] for j in range(V)]
            w = [v[j] - r[j] for j in range(V)] if erase and not reverse else v
            dβ = sum(g[j] * w[j] for j in range(V))
            k_dk = β * (dβ - sum(g[j] * r[j] for j in range(V)) if erase else dβ)

            @block.once
            def _():
                put_scalars(gmem["dv"], token, [β * g[j] for j in range(V)])
                gmem["dβ"][token] = dβ

            dh = h * (-(inverse * inverse) * k_dk)
            new_da = []
            for j in range(V):
                erased, written = β * inverse * g[j], β * inverse * w[j]
                X, D_j = X_of(j), D[j] if cut.keep else D_of(j)
                if reads:
                    new_da.append(da[j] + dx * (X if reverse else X + h * written))
                if reverse:
                    X = X - h * written
                    block.put(block.slot("X", slot, j), X)
                dh = dh + D_j * written
                if erase:
                    dh = dh - X * erased
                    D_j = D_j - h * erased
                block.put(block.slot("D", slot, j), D_j)
            block.put(block.slot("h", slot), dh)
            return new_da

        def store(token, slot):
            whole = (token, slice(None), block.columns)
            if reverse:
                plgpu.copy_smem_to_gmem(block.slot("X", slot), gmem["X_"].at[whole], commit_group=False)
            plgpu.copy_smem_to_gmem(block.slot("D", slot), gmem["dX"].at[whole], commit_group=False)
            plgpu.copy_smem_to_gmem(block.slot("h", slot), gmem["dh"].at[token, block.columns])

        block.start(load)
        a = [block.get(gmem["a"].at[j, block.columns], shared=False) for j in range(V)] if reads else []
        da = block.walk(fetch, work, store, [block.zeros() for _ in a])
        for j in range(len(a)):
            block.put(gmem["da"].at[block.index, j, block.columns], da[j])

    inputs = {"X": state, "h": branch, "v": value.astype(F32), "β": gate.astype(F32), "dX'": d_new.astype(state.dtype)}
    outputs = {"X_": jax.ShapeDtypeStruct(state.shape, state.dtype)} if reverse else {}
    outputs |= {
        "dX": jax.ShapeDtypeStruct(state.shape, state.dtype),
        "dh": jax.ShapeDtypeStruct(branch.shape, branch.dtype),
        "dv": jax.ShapeDtypeStruct((tokens, V), F32),
        "dβ": jax.ShapeDtypeStruct((tokens,), F32),
    }
    slots = {"X": ((V,), state.dtype), "D": ((V,), state.dtype), "h": ((), branch.dtype)}
    if reads:
        inputs |= {"a": weights.astype(F32), "dx": d_read.astype(state.dtype)}
        outputs["da"] = jax.ShapeDtypeStruct((cut.blocks, V, width), F32)
        slots["dx"] = ((), state.dtype)
    name = ("rewrite_and_read_" if reads else "rewrite_") + ("reverse" if reverse else "backward")
    rows = shapes.rows(V, backward=True) if erase else 1 + V
    out = launch(name, body, cut, tokens, inputs, outputs, slots, {}, rows=rows, interpret=interpret)
    if reads:
        out["da"] = jnp.sum(out["da"], axis=0)
    return tuple(out.values())


def put_scalars(ref, token, scalars) -> None:
    """A token's numbers, one per channel, to global memory."""
    for j, scalar in enumerate(scalars):
        ref[token, j] = scalar
