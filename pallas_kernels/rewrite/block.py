"""One block of a kernel: its walk over tokens, its strips of the width, and the sums its threads exchange."""

from collections.abc import Callable, Iterator

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.h200 import WARPGROUP
from pallas_kernels.rewrite.shapes import Plan, chunks, padded

F32 = jnp.float32
WARPS = 4  # of a warpgroup


def _strip_layout(box: int):
    """(boxes, box) features: each box lies over all threads of the warpgroup, neighbours (two of 256) in one thread."""
    return plgpu.Layout.TILED(plgpu.Tiling(((box,), (box // WARPS,), (box // WARPGROUP,))), (-3,), (-2,), -1)


def _rows_layout(rows: int):
    """(rows, box) numbers to be summed along rows: a quarter of the rows to each warp, 4 numbers a step to a thread."""
    if rows == WARPS:
        return plgpu.Layout.TILED(plgpu.Tiling(((rows, WARPGROUP), (4,))), (-3,), (-2,), -1)
    tiling = plgpu.Tiling(((rows, WARPGROUP), (rows // WARPS, 4 * WARPGROUP // rows), (4,)))
    return plgpu.Layout.TILED(tiling, (-5,), (-3, -2), -1)


class Block:
    """A warpgroup's view of its block: which tokens, which features, which slots are its own.

    Automatic barriers around every store to shared memory are off (`launch`), for these reasons. All loads from and
    stores to a slot have one layout, in which a warp owns its features (within it, `ldmatrix` and `stmatrix` pass them
    between lanes, in order), so that no warp sees what another writes before `commit_smem`, which all threads pass
    before TMA takes the slot. A slot is loaded again only after its store has been waited for, again by all. `sums`
    meets twice, and its buffers are written again only after one more meeting (the `commit_smem` before the store).
    """

    def __init__(self, cut: Plan, tokens: int, smem: dict, barriers: dict):
        self.cut, self.tokens, self.smem, self.barriers = cut, tokens, smem, barriers
        self.index = lax.axis_index("block")
        self.warpgroup = lax.axis_index("warpgroup") if cut.warpgroups > 1 else 0
        self.columns = pl.ds(self.warpgroup * cut.boxes, cut.boxes)
        self.steps = lax.div(tokens - self.index + cut.blocks - 1, cut.blocks)
        self.layout = _strip_layout(cut.box)

    def slot(self, name: str, slot, *channel) -> object:
        """This warpgroup's part of a slot (or of one channel in it)."""
        return self.smem[name].at[(self.warpgroup, slot, *channel)]

    def get(self, ref, *, shared: bool = True) -> jax.Array:
        """A strip of shared or global memory, in float32 registers."""
        # jax 0.11 knows optimised loads, those that avoid bank conflicts, of shared memory only.
        return plgpu.layout_cast(plgpu.load(ref, optimized=shared).astype(F32), self.layout)

    def put(self, ref, strip: jax.Array) -> None:
        """The strip back to memory, in the memory's dtype."""
        ref[...] = strip.astype(ref.dtype)

    def zeros(self) -> jax.Array:
        return plgpu.layout_cast(jnp.zeros((self.cut.boxes, self.cut.box), F32), self.layout)

    def once(self, write) -> None:
        """Runs `write`, which stores scalars to global memory, on one warpgroup of the block."""
        if self.cut.warpgroups > 1:
            pl.when(self.warpgroup == 0)(write)
        else:
            write()

    def sums(self, products: Iterator[jax.Array], step) -> Callable[[int], jax.Array]:
        """The sums over the width of products of strips: a function that reads the n-th from shared memory, float32.

        Every thread adds up its own features over the boxes. A row of such sums per product goes to shared memory,
        where a few threads add up each row. Deterministic: the order depends on the plan alone. Products are taken one
        after the other, so that they need not all be in registers at once.
        """
        lines, totals = self.smem["lines"], self.smem["totals"]
        half = lax.rem(step, 2) if self.cut.warpgroups > 1 else 0
        count = 0
        for row, product in enumerate(products):
            count += 1
            if self.cut.boxes == 1:  # a sum over one box finds no layout
                lines[self.warpgroup, pl.ds(row, 1)] = product
            else:
                lines[self.warpgroup, row] = plgpu.layout_cast(jnp.sum(product, axis=0), self.layout)
        plgpu.commit_smem()
        row = 0
        for rows in chunks(count):
            chunk = plgpu.layout_cast(lines[self.warpgroup, pl.ds(row, rows)], _rows_layout(rows))
            totals[half, self.warpgroup, pl.ds(row, rows)] = jnp.sum(chunk, axis=1)
            row += rows
        plgpu.commit_smem()
        if self.cut.warpgroups > 1:
            # A warpgroup can be one token ahead of another at this barrier, not two: hence the halves of `totals`.
            plgpu.barrier_arrive(self.barriers["exchanged"])
            plgpu.barrier_wait(self.barriers["exchanged"])
        return lambda row: sum(totals[half, n, row] for n in range(self.cut.warpgroups))

    def start(self, load) -> None:
        """Fills the ring: `load(token, slot, barrier)` starts the copies of one token's strips."""
        self._load = load
        for step in range(self.cut.stages - self.cut.stores_behind):
            self._load_step(step)

    def _load_step(self, step):
        slot = lax.rem(step, self.cut.stages)
        barrier = self.barriers["loaded"].at[self.warpgroup * self.cut.stages + slot]
        pl.when(step < self.steps)(lambda: self._load(self.index + step * self.cut.blocks, slot, barrier))

    def walk(self, fetch, work, store, carry):
        """Does every token of this block and returns the last carry.

        `work(token, slot, step, scalars, carry) → carry` does one token, whose strips lie in the slot; `scalars` is
        what `fetch(token)` read from global memory, one token ahead. `store(token, slot)` starts the copies of what
        the slot then holds, as one group.
        """
        cut, last = self.cut, self.tokens - 1

        def one_token(step, carry):
            scalars, carry = carry
            token, slot = self.index + step * cut.blocks, lax.rem(step, cut.stages)
            next_scalars = fetch(lax.min(token + cut.blocks, last))
            plgpu.barrier_wait(self.barriers["loaded"].at[self.warpgroup * cut.stages + slot])
            carry = work(token, slot, step, scalars, carry)
            plgpu.commit_smem()
            store(token, slot)
            plgpu.wait_smem_to_gmem(cut.stores_behind, wait_read_only=True)
            self._load_step(step + cut.stages - cut.stores_behind)
            return next_scalars, carry

        first = fetch(lax.min(self.index, last))
        _, carry = lax.fori_loop(0, self.steps, one_token, (first, carry))
        plgpu.wait_smem_to_gmem(0)
        return carry


def launch(
    name: str, body, cut: Plan, tokens: int, inputs: dict, outputs: dict, slots: dict, buffers: dict, *, rows, interpret
):
    """Runs `body(block, gmem)` on every block; the outputs by name.

    Args:
        name: the kernel's, as compiled programs and profiles show it.
        body: what a block does; `gmem` holds the inputs and outputs in global memory by name.
        cut: how the work is cut.
        tokens: N.
        inputs: arrays by name; their last axis, where it is the width, is cut into boxes.
        outputs: shapes and dtypes by name, likewise.
        slots: by name, what is loaded of one token into a slot: leading shape and dtype.
        buffers: likewise, what a slot has room for besides.
        rows: sums over the width that a token needs.
        interpret: None on a GPU, or what the interpreter takes.
    """
    n, stages, strip = cut.warpgroups, cut.stages, (cut.boxes, cut.box)
    width = n * cut.boxes * cut.box

    def boxed(shape):
        """The shape with its width, where it has one, cut into boxes; V, the other last axis, is never so large."""
        has_width = len(shape) > 1 and shape[-1] == width
        return (*shape[:-1], width // cut.box, cut.box) if has_width else shape

    def kernel_body(*refs):
        arrays, scratch = refs[: len(inputs) + len(outputs)], refs[len(inputs) + len(outputs) :]
        gmem = dict(zip((*inputs, *outputs), arrays, strict=True))
        smem = dict(zip((*slots, *buffers, "lines", "totals"), scratch, strict=False))
        barriers = dict(zip(("loaded", "exchanged"), scratch[len(smem) :], strict=False))
        body(Block(cut, tokens, smem, barriers), gmem)

    kernel_body.__name__ = name
    scratch = [plgpu.SMEM((n, stages, *leading, *strip), dtype) for leading, dtype in (slots | buffers).values()]
    scratch += [plgpu.SMEM((n, padded(rows), cut.box), F32), plgpu.SMEM((min(n, 2), n, padded(rows)), F32)]
    scratch.append(plgpu.Barrier(num_arrivals=len(slots), num_barriers=n * stages))
    options = {} if interpret is None else {"interpret": interpret}
    if n > 1:
        scratch.append(plgpu.Barrier(num_arrivals=n))
        options.update(num_threads=n, thread_name="warpgroup")
    kernel = plgpu.kernel(
        kernel_body,
        out_type=[jax.ShapeDtypeStruct(boxed(out.shape), out.dtype) for out in outputs.values()],
        grid=(cut.blocks,),
        grid_names=("block",),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        **options,
    )
    arrays = [array.reshape(boxed(array.shape)) for array in inputs.values()]
    with jax.enable_x64(False):  # of indices: arrays have dtypes of their own
        results = kernel(*arrays)
    return {name: result.reshape(outputs[name].shape) for name, result in zip(outputs, results, strict=True)}
