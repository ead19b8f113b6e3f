"""What the Mosaic GPU kernels of the token read take, how they cut it, and the bytes it costs.

A block is one warpgroup. It owns a strip of the features and a run of consecutive tokens, and walks the run in groups
of a few tokens, one TMA box each. Nothing is summed over features, so a strip needs nothing of the others.
"""

import dataclasses
import math

import jax.numpy as jnp

from pallas_kernels.h200 import MULTIPROCESSORS, SHARED_MEMORY, WARPGROUP

DTYPES = ("bfloat16", "float32")
MOST_CHANNELS = MOST_TAPS = 8


def unsupported(state_shape: tuple[int, ...], dtype, taps: int) -> str | None:
    """Why the kernels cannot read a state (…, T, V, d) of this dtype with K taps, or None where they can."""
    *leading, channels, width = state_shape
    if width % WARPGROUP or width == 0:
        below = width // WARPGROUP * WARPGROUP
        nearest = " and ".join(str(legal) for legal in (below, below + WARPGROUP) if legal)
        return f"width {width} is not a multiple of {WARPGROUP}; nearest: {nearest}"
    for name, value, most in (("channels", channels, MOST_CHANNELS), ("taps", taps, MOST_TAPS)):
        if not 1 <= value <= most:
            return f"{value} {name} are outside 1 to {most}; nearest: {min(max(value, 1), most)}"
    if jnp.dtype(dtype).name not in DTYPES:
        return f"a state of dtype {jnp.dtype(dtype).name} is not supported; use {' or '.join(DTYPES)}"
    if math.prod(leading) == 0:
        return f"a state of shape {tuple(state_shape)} has no tokens; at least 1"
    return None


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one pass is cut.

    Attributes:
        tiles: rows of `lanes` features in a strip.
        lanes: elements of the minor dimension of a TMA box, which takes at most 256.
        strips: strips in the width.
        group: tokens in a box.
        slots: boxes on their way to a block's shared memory, or in use there.
        runs: consecutive pieces of the flat tokens, of `tokens // group` groups in all, as equal as can be.
        halo: tokens of its neighbour that a run reads.
        tail: tokens after the last full group; they belong to the last run.
        shared_memory: bytes of a block.
        blocks_per_multiprocessor: how many of them run at a time: what registers and shared memory leave room for.
    """

    tiles: int
    lanes: int
    strips: int
    group: int
    slots: int
    runs: int
    halo: int
    tail: int
    shared_memory: int
    blocks_per_multiprocessor: int

    @property
    def strip(self) -> int:
        """Features in a strip."""
        return self.lanes * self.tiles

    @property
    def blocks(self) -> int:
        return self.runs * self.strips


def plan(tokens: int, channels: int, width: int, taps: int, dtype, *, backward: bool) -> Plan:
    """The plan for `tokens` tokens in all (sequences laid end to end)."""
    size, columns = jnp.dtype(dtype).itemsize, width // WARPGROUP
    # For each of its features a thread holds K·V weights and K running values in registers, in backward K·V sums too;
    # and 4 tokens should fit a box of 8 KB. More strips make longer runs: two where there can be.
    wide = [c for c in (4, 2) if columns % c == 0 and columns > c]
    each = max([1, *(c for c in wide if taps * (channels + 1) * c <= 40 and channels * c * size <= 16)])
    strip = each * WARPGROUP
    strips = width // strip
    # Boxes of 5 to 10 KB: smaller ones cost more instructions per byte, larger ones leave fewer in flight. The bound on
    # what is unrolled keeps the registers in bounds, too.
    loaded = (channels + backward) * strip * size  # bytes per token
    group = 2
    while group < 16 and 2 * group * loaded <= 10240 and 2 * group * taps * each <= 64:
        group *= 2
    tail = tokens % group

    def shared_memory(slots):
        loads = (slots * group * channels, tail * channels)
        per_buffer = (
            (*loads, slots * group, tail, taps - 1, 2 * group * channels)
            if backward
            else (*loads, (taps - 1) * channels, 2 * group)
        )
        return sum(-(-n * strip * size // 1024) * 1024 for n in per_buffer) + 1024  # and the barriers

    def fits(blocks, slots):
        return blocks * (shared_memory(slots) + 1024) <= SHARED_MEMORY

    # ptxas: at most 128 registers to 64 weights and sums, which leaves room for four blocks; 168, for three, to 128.
    most = 4 if taps * channels * each * (1 + backward) <= 64 else 3
    blocks = next(n for n in range(most, 0, -1) if fits(n, 2))
    slots = next(n for n in range(min(max(32768 // (group * loaded), 4), 8), 1, -1) if fits(blocks, n))
    # All blocks run at once, each on as long a run as that gives. Halos, weights and partial sums are per run, so
    # there are fewer runs where these would cost more than a twentieth, but one block per multiprocessor all the same.
    # The least length bounds their cost where there are few tokens.
    per_token = (2 * channels + 1 if backward else channels + 1) * size
    per_run = (taps - 1) * (1 if backward else channels) * size + taps * channels * 4 * (1 + backward)
    affordable = int(0.048 * tokens * per_token / per_run)
    least = -(-max(16, 2 * taps) // group)
    enough, most = MULTIPROCESSORS // strips, MULTIPROCESSORS * blocks // strips
    runs = max(1, min(max(affordable, enough), most, tokens // group // least))
    halo = taps - 1 if runs > 1 else 0
    lanes = min(strip, 256)
    return Plan(strip // lanes, lanes, strips, group, slots, runs, halo, tail, shared_memory(slots), blocks)


def minimum_bytes(tokens: int, channels: int, width: int, taps: int, dtype, *, backward: bool) -> int:
    """Every input read once and every output written once: (V+1) d per token, backward (2V+1) d, and the weights."""
    per_token = (2 * channels + 1 if backward else channels + 1) * width * jnp.dtype(dtype).itemsize
    return tokens * per_token + taps * channels * width * 4 * (1 + backward)


def moved_bytes(tokens: int, channels: int, width: int, taps: int, dtype, *, backward: bool) -> int:
    """What the kernel's own copies move: its boxes, its halos, the weights once per run and the partial sums."""
    cut = plan(tokens, channels, width, taps, dtype, backward=backward)
    per_token = 2 * channels + 1 if backward else channels + 1
    halo = cut.halo * (1 if backward else channels)
    weights = taps * channels * width * 4 * (1 + backward)
    return (per_token * tokens + halo * cut.runs) * width * jnp.dtype(dtype).itemsize + cut.runs * weights
