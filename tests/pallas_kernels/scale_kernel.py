"""A small pipelined kernel to try the H200 compiler and the byte counter on: rows of x times a factor per column."""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

LANES = 128


def scale(x, factor, *, blocks=8, rows=1, stages=3, loads=1, live=0, interpret=None):
    """x (N, W) bfloat16 times factor (W,) float32, in x's dtype.

    Args:
        x: the rows; W is a multiple of 128.
        factor: one per column; every block reads it once, past shared memory.
        blocks: each takes every `blocks`-th tile.
        rows: to a tile.
        stages: tiles in a block's ring.
        loads: how often each tile is loaded into its place.
        live: so many more arrays are kept in registers through a sum over all of them, without a use.
        interpret: as of `plgpu.kernel`.
    """
    number, width = x.shape
    tile = (rows, width // LANES, LANES)

    def body(x_gmem, factor_gmem, out_gmem, x_smem, out_smem, loaded):
        block = lax.axis_index("block")
        steps = (-(-number // rows) - block + blocks - 1) // blocks

        def place(step):
            return pl.ds((block + step * blocks) * rows, rows)

        def load(step):
            slot = lax.rem(step, stages)
            for _ in range(loads):
                plgpu.copy_gmem_to_smem(x_gmem.at[place(step)], x_smem.at[slot], loaded.at[slot])

        for stage in range(stages):
            pl.when(stage < steps)(lambda stage=stage: load(stage))
        columns = factor_gmem[...]

        def tile_step(step, _):
            slot = lax.rem(step, stages)
            plgpu.barrier_wait(loaded.at[slot])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for row in range(rows):
                values = x_smem[slot, row].astype(jnp.float32)
                kept = [jnp.exp(values * (i + 1)) for i in range(live)]
                total = sum((jnp.sum(array) for array in kept), 0.0)
                for array in kept:
                    values = values + array * total
                out_smem[row] = (values * columns).astype(x.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[place(step)])
            pl.when(step + stages < steps)(lambda: load(step + stages))
            return ()

        lax.fori_loop(0, steps, tile_step, ())
        plgpu.wait_smem_to_gmem(0)

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((number, *tile[1:]), x.dtype),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((stages, *tile), x.dtype),
            plgpu.SMEM(tile, x.dtype),
            plgpu.Barrier(num_arrivals=loads, num_barriers=stages),
        ],
        **({} if interpret is None else {"interpret": interpret}),
    )(x.reshape(number, *tile[1:]), factor.reshape(tile[1:]))
    return out.reshape(x.shape)


def arguments(number, width=256, sharding=None, replicated=None):
    """The types of `scale`'s arguments."""
    return (
        jax.ShapeDtypeStruct((number, width), jnp.bfloat16, sharding=sharding),
        jax.ShapeDtypeStruct((width,), jnp.float32, sharding=replicated),
    )
