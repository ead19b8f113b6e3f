"""What the kernels of the rewrite take, how they cut their work, and the least they must move."""

import dataclasses
import math

import jax.numpy as jnp

from pallas_kernels.h200 import (
    BOX,
    MULTIPROCESSORS,
    REGISTERS,
    SHARED_MEMORY,
    SHARED_MEMORY_PER_BLOCK,
    SHARED_MEMORY_RESERVED,
    WARPGROUP,
)

MOST_CHANNELS = 8
DTYPES = ("bfloat16", "float32")
STRIP = 32  # numbers of one token's X beyond which a thread shares the work with a second warpgroup: see `plan`
MOST_HELD = 168  # numbers that backward may have to hold in a thread without spilling, of 255 registers: from ptxas
# Bytes of loads that hide the memory's latency: Little's law at 4.8 TB/s over 132 multiprocessors and about a
# microsecond asks for 36 KB; a reserve on top for the time in which a block computes.
IN_FLIGHT = 64 * 1024


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a kernel cuts its work.

    A block has tokens b, b + blocks, b + 2 blocks, …, one after the other. Each of its warpgroups has a strip of the
    width, and in shared memory a ring of slots, each with room for one token's strip.

    Attributes:
        warpgroups: in a block, 1 or 2.
        box: features along the minor dimension of a copy.
        boxes: in a strip.
        stages: slots in the ring.
        blocks_per_multiprocessor: what registers and shared memory leave room for.
        blocks: in the whole grid.
        keep: whether threads have registers to keep what they could make or read again.
    """

    warpgroups: int
    box: int
    boxes: int
    stages: int
    blocks_per_multiprocessor: int
    blocks: int
    keep: bool

    @property
    def stores_behind(self) -> int:
        """Tokens whose stores may still be reading their slots when the next load is started."""
        return 1 if self.stages > 2 else 0


def unsupported(state_shape: tuple[int, ...], *dtypes) -> str | None:
    """Why the kernels cannot take a state (…, V, d) and branch of these dtypes, or None where they can."""
    *tokens, channels, width = state_shape
    if width % WARPGROUP or width == 0:
        below = width // WARPGROUP * WARPGROUP
        nearest = " and ".join(str(legal) for legal in (below, below + WARPGROUP) if legal)
        return f"width {width} is not a multiple of {WARPGROUP}; nearest: {nearest}"
    if not 1 <= channels <= MOST_CHANNELS:
        return f"{channels} channels are outside 1 to {MOST_CHANNELS}; nearest: {min(max(channels, 1), MOST_CHANNELS)}"
    for dtype in dtypes:
        if jnp.dtype(dtype).name not in DTYPES:
            return f"dtype {jnp.dtype(dtype).name} is not supported; use {' or '.join(DTYPES)}"
    if math.prod(tokens) == 0:
        return f"a state of shape {tuple(state_shape)} has no tokens; at least 1"
    # Backward holds a and da, both of X's size, and h, dx and dh.
    columns = MOST_HELD // (2 * channels + 3)
    warpgroups = _warpgroups(channels, width)
    if width > columns * warpgroups * WARPGROUP:
        nearest = 2 * columns * WARPGROUP  # two warpgroups, however many boxes each has
        return f"width {width} with {channels} channels needs more registers than there are; nearest: {nearest}"
    if channels > 1 and warpgroups > 1 and width % (warpgroups * 8 * BOX) == 0:
        # Mosaic GPU tiles slots of 8, 16, … boxes; a copy of several channels then has six dimensions, one too many.
        nearest = f"{width - 2 * BOX} and {width + 2 * BOX}"
        return f"width {width} with {channels} channels takes copies of more than five dimensions; nearest: {nearest}"
    return None


def _warpgroups(channels: int, width: int) -> int:
    """Two warpgroups share a token where one would have too much of it, each with half of the width."""
    columns = width // WARPGROUP
    return 2 if channels * columns > STRIP and columns % 2 == 0 else 1


def plan(
    tokens: int, channels: int, width: int, state_dtype, branch_dtype, *, reads: bool, backward=False, reverse=False
) -> Plan:
    """The plan for one kernel.

    Args:
        tokens: N.
        channels: V.
        width: d.
        state_dtype: of X.
        branch_dtype: of h.
        reads: whether the next read is part of it.
        backward: whether it is the backward kernel.
        reverse: whether that gives X back, too.
    """
    warpgroups = _warpgroups(channels, width)
    columns = width // WARPGROUP // warpgroups
    box = BOX if columns % (BOX // WARPGROUP) == 0 else WARPGROUP
    token = token_bytes(channels, width, state_dtype, branch_dtype, backward=backward, reads=reads)
    # A thread's part of X is `strip` numbers. What it holds of that size, and about what besides, is from ptxas:
    # forward X and a; backward a, da and where there is room D, in reverse two of it.
    strip = channels * columns
    keep = strip <= STRIP
    copies = (2 * reads + keep + (keep and reverse)) if backward else (1 + reads)
    if backward:
        besides = 72
    elif warpgroups > 1:
        besides = 56
    else:
        besides = 40 + 10 * max(0, channels - 4)
    registers = min(besides + strip * copies + 3 * columns + 7 & ~7, 255)
    sums = 4 * (box + 2) * padded(rows(channels, backward)) * warpgroups
    barriers_and_alignment = 2048

    def stages(blocks: int) -> int:
        share = min(SHARED_MEMORY // blocks - SHARED_MEMORY_RESERVED, SHARED_MEMORY_PER_BLOCK)
        return (share - sums - barriers_and_alignment) // token

    most = max(1, min(8, REGISTERS // (registers * WARPGROUP * warpgroups)))
    blocks = next((n for n in range(most, 1, -1) if stages(n) >= 3), 1)
    # Enough slots for IN_FLIGHT besides the one that is worked on and the one that is stored, four at least, eight at
    # most, as far as there is room.
    loaded = token - (reads and not backward) * width * jnp.dtype(state_dtype).itemsize
    wanted = 2 + math.ceil(IN_FLIGHT / (blocks * loaded))
    return Plan(
        warpgroups=warpgroups,
        box=box,
        boxes=columns * WARPGROUP // box,
        stages=max(1, min(max(4, wanted), 8, stages(blocks))),
        blocks_per_multiprocessor=blocks,
        blocks=max(1, min(tokens, MULTIPROCESSORS * blocks)),
        keep=keep,
    )


def rows(channels: int, backward: bool) -> int:
    """Sums over the width that one token needs: ‖h‖², and hᵀX (and hᵀD) for each channel."""
    return 1 + channels * (2 if backward else 1)


def chunks(count: int) -> list[int]:
    """Rows padded to chunks that a warpgroup sums well: 16 at a time, the rest as a power of two, at least 4."""
    full, rest = divmod(count, 16)
    return [16] * full + ([max(4, 1 << (rest - 1).bit_length())] if rest else [])


def padded(count: int) -> int:
    return sum(chunks(count))


def token_bytes(channels: int, width: int, state_dtype, branch_dtype, *, backward: bool, reads: bool) -> int:
    """Shared memory of one token: X, h, the read x or dx, and in backward D."""
    of_state = (2 * channels if backward else channels) + (1 if reads else 0)
    return width * (of_state * jnp.dtype(state_dtype).itemsize + jnp.dtype(branch_dtype).itemsize)


def minimum_bytes(
    tokens: int, channels: int, width: int, state_dtype, branch_dtype, *, reads: bool, backward=False, reverse=False
) -> int:
    """Every input read once, every output written once (design 3.2).

    Forward X, h → X' (and x); backward X, h, dX' (and dx) → dX, dh, and with `reverse` X too. Besides, per token v and
    β (and their cotangents), and once the weights (and theirs).
    """
    state, branch = (jnp.dtype(dtype).itemsize * width for dtype in (state_dtype, branch_dtype))
    if backward:
        per_token = (4 if reverse else 3) * channels * state + 2 * branch + (state if reads else 0)
        per_token += 2 * 4 * (channels + 1)
    else:
        per_token = 2 * channels * state + branch + (state if reads else 0) + 4 * (channels + 1)
    weights = channels * width * 4 * (2 if backward else 1) if reads else 0
    return tokens * per_token + weights
