"""The token read and its backward as Pallas Mosaic GPU kernels for Hopper: one pass over the state each.

Sequences are laid end to end, and a block walks a run of tokens (`shapes.plan`). With K running values in registers
each token is touched once: forward walks up, and X[t] adds to what x[t], …, x[t+K−1] have so far; backward walks down,
and keeps dx[t], …, dx[t+K−1]. Before its run a block reads a halo of the K−1 tokens that reach into it, after its run
in backward; running values are dropped where a sequence begins (ends), which also drops a halo that does not exist.
"""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.token_read import shapes

F32 = jnp.float32


class _Walk:
    """Which part of the arrays a block owns, and where in it sequences begin and end."""

    def __init__(self, cut, tokens, length):
        self.cut, self.length = cut, length
        block = lax.axis_index("block")
        # Strips are the fast axis, so that the blocks running at one time read whole rows.
        self.strip, self.run = lax.rem(block, cut.strips), lax.div(block, cut.strips)
        each, more = divmod(tokens // cut.group, cut.runs)
        self.first = (self.run * each + lax.min(self.run, more)) * cut.group
        self.groups = each + (self.run < more).astype(jnp.int32)
        self.end = self.first + self.groups * cut.group
        self.is_last = self.run == cut.runs - 1

    def features(self):
        return pl.ds(self.strip * self.cut.tiles, self.cut.tiles)

    def box(self, array, token, tokens):
        """This strip of `tokens` tokens of (tokens, …, tiles, lanes)."""
        between = (slice(None),) * (len(array.shape) - 3)
        return array.at[(pl.ds(token, tokens), *between, self.features())]

    def drop(self, running, token, place, edge):
        """The running values as token `token` finds them: zero where its sequence begins (edge 0) or ends (T−1).

        `place` is the token's distance from a multiple of the group, known when the kernel is built: where groups
        divide sequences, only few places can be an edge.
        """
        if self.length % self.cut.group == 0 and (place - edge) % self.cut.group:
            return running
        is_edge = lax.rem(token, self.length) == edge
        return [jnp.where(jnp.broadcast_to(is_edge, value.shape), 0.0, value) for value in running]


def _launch(cut, interpret):
    # Automatic barriers stand around every store to shared memory, 32 of them for 4 tokens of 4 channels. Ours are
    # enough: a slot is written by TMA only and read by threads only, an outgoing buffer the other way round; threads
    # meet in `wait_smem_to_gmem` before they write a buffer again, and in `commit_smem` between their last read of a
    # slot and the load that fills it again.
    parameters = plgpu.CompilerParams(unsafe_no_auto_barriers=True)
    kwargs = {} if interpret is None else {"interpret": interpret}
    return dict(grid=(cut.blocks,), grid_names=("block",), compiler_params=parameters, **kwargs)


def _tiled(array, cut):
    """(…, d) as (…, d / lanes, lanes): a TMA box has at most 256 elements along a dimension."""
    return array.reshape(*array.shape[:-1], -1, cut.lanes)


def _load_weights(weights, walk, taps, channels):
    return [[weights[s, j, walk.features()] for j in range(channels)] for s in range(taps)]


def _dot(weights, values, start=None):
    """start + Σ weights · values as a chain of fused multiply-adds."""
    for weight, value in zip(weights, values, strict=True):
        start = weight * value if start is None else weight * value + start
    return start


def token_read(state, weights, *, interpret=None):
    """x (B, T, d) of state X (B, T, V, d) and weights a (K, V, d): x_i[t] = Σ_s Σ_j a_sji X_ji[t−s]."""
    batch, length, V, width = state.shape
    weights = weights[:length].astype(F32)  # taps past the sequence see zeros only
    K, tokens = weights.shape[0], batch * length
    cut = shapes.plan(tokens, V, width, K, state.dtype, backward=False)
    G, S, halo = cut.group, cut.slots, cut.halo

    def token_read(x_gmem, a_gmem, read_gmem, *, x_smem, read_smem, loaded, **edge):
        walk = _Walk(cut, tokens, length)

        def load(step, slot):
            source = walk.box(x_gmem, walk.first + step * G, G)
            plgpu.copy_gmem_to_smem(source, x_smem.at[slot], loaded.at[slot])

        if halo:
            before = walk.box(x_gmem, lax.max(walk.first - halo, 0), halo)
            plgpu.copy_gmem_to_smem(before, edge["halo_smem"], edge["halo_loaded"])
        for step in range(S):
            pl.when(step < walk.groups)(lambda step=step: load(step, step))
        if cut.tail:
            rest = walk.box(x_gmem, tokens - cut.tail, cut.tail)
            pl.when(walk.is_last)(lambda: plgpu.copy_gmem_to_smem(rest, edge["tail_smem"], edge["tail_loaded"]))
        a = _load_weights(a_gmem, walk, K, V)

        def read_token(so_far, X, token, place):
            """x[t], and what x[t+1], …, x[t+K−1] have so far."""
            so_far = walk.drop(so_far, token, place, 0)
            sums = [_dot(a[s], X, so_far[s] if s < K - 1 else None) for s in range(K)]
            return sums[0], sums[1:]

        def read_tokens(so_far, first, source, target, count):
            for g in range(count):
                X = [source[g, j].astype(F32) for j in range(V)]
                x, so_far = read_token(so_far, X, first + g, g)
                target[g] = x.astype(target.dtype)
            return so_far

        so_far = [jnp.zeros((cut.tiles, cut.lanes), F32) for _ in range(K - 1)]
        if halo:
            plgpu.barrier_wait(edge["halo_loaded"])
            for i in range(halo):
                X = [edge["halo_smem"][i, j].astype(F32) for j in range(V)]
                _, so_far = read_token(so_far, X, walk.first - halo + i, i - halo)

        def step(i, so_far):
            slot, half = lax.rem(i, S), lax.rem(i, 2)
            plgpu.barrier_wait(loaded.at[slot])
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the store of two steps ago has left its buffer
            first = walk.first + i * G
            so_far = read_tokens(so_far, first, x_smem.at[slot], read_smem.at[half], G)
            plgpu.commit_smem()  # every thread has read its slot and written its half
            plgpu.copy_smem_to_gmem(read_smem.at[half], walk.box(read_gmem, first, G))
            pl.when(i + S < walk.groups)(lambda: load(i + S, slot))
            return so_far

        so_far = lax.fori_loop(0, walk.groups, step, so_far)
        if cut.tail:

            @pl.when(walk.is_last)
            def _():
                half = lax.rem(walk.groups, 2)
                plgpu.barrier_wait(edge["tail_loaded"])
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                target = read_smem.at[half, pl.ds(0, cut.tail)]
                read_tokens(so_far, walk.end, edge["tail_smem"], target, cut.tail)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(target, walk.box(read_gmem, tokens - cut.tail, cut.tail))

        plgpu.wait_smem_to_gmem(0)

    row = (cut.tiles, cut.lanes)
    scratch = {
        "x_smem": plgpu.SMEM((S, G, V, *row), state.dtype),
        "read_smem": plgpu.SMEM((2, G, *row), state.dtype),
        "loaded": plgpu.Barrier(num_arrivals=1, num_barriers=S),
    }
    if halo:
        scratch["halo_loaded"] = plgpu.Barrier(num_arrivals=1)
        scratch["halo_smem"] = plgpu.SMEM((halo, V, *row), state.dtype)
    if cut.tail:
        scratch["tail_loaded"] = plgpu.Barrier(num_arrivals=1)
        scratch["tail_smem"] = plgpu.SMEM((cut.tail, V, *row), state.dtype)
    kernel = plgpu.kernel(
        token_read,
        out_type=jax.ShapeDtypeStruct((tokens, width // cut.lanes, cut.lanes), state.dtype),
        scratch_types=scratch,
        **_launch(cut, interpret),
    )
    x, a = _tiled(state.reshape(tokens, V, width), cut), _tiled(weights, cut)
    with jax.enable_x64(False):  # of indices: arrays have dtypes of their own
        read = kernel(x, a)
    return read.reshape(batch, length, width)


def token_read_backward(state, weights, d_read, *, interpret=None):
    """The cotangents of `token_read`: dX (B, T, V, d) in the state's dtype and da (K, V, d) in float32.

    dX_j[t] = Σ_s a_sj dx[t+s];  da_sj = Σ_t X_j[t] dx[t+s],  with dx zero after the end of each sequence
    """
    batch, length, V, width = state.shape
    taps = weights.shape[0]
    weights = weights[:length].astype(F32)
    K, tokens = weights.shape[0], batch * length
    cut = shapes.plan(tokens, V, width, K, state.dtype, backward=True)
    G, S, halo = cut.group, cut.slots, cut.halo

    def token_read_backward(x_gmem, a_gmem, dx_gmem, dX_gmem, da_gmem, *, x_smem, dx_smem, dX_smem, loaded, **edge):
        walk = _Walk(cut, tokens, length)

        def load(step, slot):
            first = walk.end - (step + 1) * G
            plgpu.copy_gmem_to_smem(walk.box(x_gmem, first, G), x_smem.at[slot], loaded.at[slot])
            plgpu.copy_gmem_to_smem(walk.box(dx_gmem, first, G), dx_smem.at[slot], loaded.at[slot])

        if halo:
            after = walk.box(dx_gmem, lax.min(walk.end, tokens - halo), halo)
            plgpu.copy_gmem_to_smem(after, edge["halo_smem"], edge["halo_loaded"])
        if cut.tail:

            @pl.when(walk.is_last)
            def _():
                for source, target in ((x_gmem, edge["tail_x_smem"]), (dx_gmem, edge["tail_dx_smem"])):
                    plgpu.copy_gmem_to_smem(walk.box(source, tokens - cut.tail, cut.tail), target, edge["tail_loaded"])

        for step in range(S):
            pl.when(step < walk.groups)(lambda step=step: load(step, step))
        a = _load_weights(a_gmem, walk, K, V)

        def spread_tokens(carry, first, x_source, dx_source, target, count):
            """Tokens from the last to the first: dX of each, with da and dx[t+1], …, dx[t+K−1] carried on."""
            later, da = carry[0], [list(of_tap) for of_tap in carry[1]]
            for g in reversed(range(count)):
                later = walk.drop(later, first + g, g, length - 1)
                dx = [dx_source[g].astype(F32), *later]
                for j in range(V):
                    X = x_source[g, j].astype(F32)
                    target[g, j] = _dot([a[s][j] for s in range(K)], dx).astype(target.dtype)
                    for s in range(K):
                        da[s][j] += X * dx[s]
                later = dx[: K - 1]
            return later, da

        zero = jnp.zeros((cut.tiles, cut.lanes), F32)
        later, da = [zero for _ in range(K - 1)], [[zero for _ in range(V)] for _ in range(K)]
        if halo:
            plgpu.barrier_wait(edge["halo_loaded"])
            for i in reversed(range(halo)):
                later = walk.drop(later, walk.end + i, i, length - 1)
                later = [edge["halo_smem"][i].astype(F32), *later[:-1]]
        carry = later, da
        if cut.tail:

            def tail(_, carry):
                plgpu.barrier_wait(edge["tail_loaded"])
                target = dX_smem.at[1, pl.ds(0, cut.tail)]
                sources = edge["tail_x_smem"], edge["tail_dx_smem"]
                carry = spread_tokens(carry, walk.end, *sources, target, cut.tail)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(target, walk.box(dX_gmem, tokens - cut.tail, cut.tail))
                return carry

            # A loop of at most one step is a condition that carries values.
            carry = lax.fori_loop(0, walk.is_last.astype(jnp.int32), tail, carry)

        def step(i, carry):
            slot, half = lax.rem(i, S), lax.rem(i, 2)
            plgpu.barrier_wait(loaded.at[slot])
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the store of two steps ago has left its buffer
            first = walk.end - (i + 1) * G
            carry = spread_tokens(carry, first, x_smem.at[slot], dx_smem.at[slot], dX_smem.at[half], G)
            plgpu.commit_smem()  # every thread has read its slot and written its half
            plgpu.copy_smem_to_gmem(dX_smem.at[half], walk.box(dX_gmem, first, G))
            pl.when(i + S < walk.groups)(lambda: load(i + S, slot))
            return carry

        _, da = lax.fori_loop(0, walk.groups, step, carry)
        for s in range(K):
            for j in range(V):
                da_gmem[walk.run, s, j, walk.features()] = da[s][j]
        plgpu.wait_smem_to_gmem(0)

    row = (cut.tiles, cut.lanes)
    scratch = {
        "x_smem": plgpu.SMEM((S, G, V, *row), state.dtype),
        "dx_smem": plgpu.SMEM((S, G, *row), state.dtype),
        "dX_smem": plgpu.SMEM((2, G, V, *row), state.dtype),
        "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=S),
    }
    if halo:
        scratch["halo_loaded"] = plgpu.Barrier(num_arrivals=1)
        scratch["halo_smem"] = plgpu.SMEM((halo, *row), state.dtype)
    if cut.tail:
        scratch["tail_loaded"] = plgpu.Barrier(num_arrivals=2)
        scratch["tail_x_smem"] = plgpu.SMEM((cut.tail, V, *row), state.dtype)
        scratch["tail_dx_smem"] = plgpu.SMEM((cut.tail, *row), state.dtype)
    x, a = _tiled(state.reshape(tokens, V, width), cut), _tiled(weights, cut)
    kernel = plgpu.kernel(
        token_read_backward,
        out_type=[jax.ShapeDtypeStruct(x.shape, state.dtype), jax.ShapeDtypeStruct((cut.runs, *a.shape), F32)],
        scratch_types=scratch,
        **_launch(cut, interpret),
    )
    dx = _tiled(d_read.astype(state.dtype).reshape(tokens, width), cut)
    with jax.enable_x64(False):
        dX, da = kernel(x, a, dx)
    da = jnp.sum(da, axis=0).reshape(weights.shape)
    return dX.reshape(state.shape), jnp.pad(da, ((0, taps - K), (0, 0), (0, 0)))
