"""Our own kernels as H200s get them: no spills, no byte more than needed, loads enough in flight."""

import functools
import itertools
import math

import jax.numpy as jnp
import pytest

from pallas_kernels import cases, hopper
from pallas_kernels.h200 import MULTIPROCESSORS, SHARED_MEMORY_PER_BLOCK
from pallas_kernels.hopper.__main__ import LEAST_IN_FLIGHT, MANY_TOKENS, MOST_MOVED
from pallas_kernels.rewrite import mosaic_gpu, shapes
from tests.h200 import needs_compiler

KERNELS = ["rewrite", "rewrite_and_read", "rewrite_backward", "rewrite_and_read_backward", "rewrite_and_read_reverse"]
KERNELS += ["token_read", "token_read_backward"]


@functools.cache
def case(kernel, shape):
    (found,) = cases.cases(kernel, shape)
    return found


def test_every_kernel_is_a_case_at_every_shape():
    assert [(c.kernel, c.shape) for c in cases.cases()] == [(k, s) for s in cases.SHAPES for k in KERNELS]
    assert {(s.channels, s.width) for s in cases.SHAPES.values()} >= {(v, d) for v in (1, 2, 4, 8) for d in (768, 1024)}


@pytest.mark.parametrize("shape", cases.SHAPES)
def test_kernels_move_hardly_more_than_the_least(shape):
    for kernel in KERNELS:
        this = case(kernel, shape)
        traffic = hopper.bytes_moved(this.function, *this.arguments)
        assert traffic.moved >= this.minimum_bytes or this.arguments[0].shape[1] == 1  # one token: one tap of the taps
        if this.tokens >= MANY_TOKENS:
            assert traffic.moved <= MOST_MOVED * this.minimum_bytes, kernel


def elements_per_token(kernel, V):
    """Elements of the width that one token moves (design 3.2)."""
    return {
        "rewrite": 2 * V + 1,
        "rewrite_and_read": 2 * V + 2,
        "rewrite_backward": 3 * V + 2,
        "rewrite_and_read_backward": 3 * V + 3,
        "rewrite_and_read_reverse": 4 * V + 3,
        "token_read": V + 1,
        "token_read_backward": 2 * V + 1,
    }[kernel]


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_least_is_what_the_design_says(kernel):
    """At many tokens what is not of the width (v, β, the weights) is a small part."""
    for shape in ("small", "medium_v8", "wide"):
        this = case(kernel, shape)
        N, V, d = math.prod(this.arguments[0].shape[:-2]), *this.arguments[0].shape[-2:]
        designed = N * d * elements_per_token(kernel, V) * this.arguments[0].dtype.itemsize
        assert designed <= this.minimum_bytes <= 1.01 * designed


def test_a_second_load_of_the_state_is_seen(monkeypatch):
    this = case("rewrite_and_read", "small")
    before = hopper.bytes_moved(this.function, *this.arguments)
    copy = mosaic_gpu.plgpu.copy_gmem_to_smem

    def twice(source, target, barrier):
        copy(source, target, barrier)
        if len(target.shape) == 3:  # X, not h
            copy(source, target, barrier)

    monkeypatch.setattr(mosaic_gpu.plgpu, "copy_gmem_to_smem", twice)
    after = hopper.bytes_moved(lambda *a: this.function(*a), *this.arguments)
    state = math.prod(this.arguments[0].shape) * 2
    assert after.moved == before.moved + state
    assert after.moved > MOST_MOVED * this.minimum_bytes


@needs_compiler
@pytest.mark.parametrize("shape", ["small", "medium_v8"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_fit_an_h200(kernel, shape):
    this = case(kernel, shape)
    taken = hopper.resources(this.function, *this.arguments)
    traffic = hopper.bytes_moved(this.function, *this.arguments)
    assert taken.spill_bytes == 0
    assert taken.shared_memory_bytes <= SHARED_MEMORY_PER_BLOCK
    # All blocks are there at once: the grid goes around tokens, not around the machine.
    resident = math.ceil(traffic.blocks / MULTIPROCESSORS)
    assert taken.blocks_per_multiprocessor >= resident
    if this.tokens >= MANY_TOKENS:
        assert traffic.in_flight * resident >= LEAST_IN_FLIGHT


@pytest.mark.parametrize("shape, dtypes, reason", [
    ((3, 4, 770), (jnp.float32,), "width 770 is not a multiple of 128; nearest: 768 and 896"),
    ((3, 4, 72), (jnp.float32,), "width 72 is not a multiple of 128; nearest: 128"),
    ((3, 9, 128), (jnp.float32,), "9 channels are outside 1 to 8; nearest: 8"),
    ((3, 4, 128), (jnp.float32, jnp.float16), "dtype float16 is not supported; use bfloat16 or float32"),
    ((0, 4, 128), (jnp.float32,), "has no tokens"),
    ((3, 8, 4096), (jnp.float32,), "width 4096 with 8 channels needs more registers than there are; nearest: 2048"),
    ((3, 1, 4480), (jnp.float32,), "width 4480 with 1 channels needs more registers than there are; nearest: 8448"),
    ((3, 2, 4096), (jnp.float32,), "copies of more than five dimensions; nearest: 3584 and 4608"),
])  # fmt: skip
def test_what_the_rewrite_cannot_take_is_refused_with_the_nearest(shape, dtypes, reason):
    assert reason in shapes.unsupported(shape, *dtypes)


@pytest.mark.parametrize("width", [128, 384, 768, 1024, 2048])
@pytest.mark.parametrize("channels", range(1, 9))
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_the_rewrite_takes_what_the_design_names(width, channels, dtype):
    assert shapes.unsupported((63, channels, width), dtype) is None


def test_slots_of_all_that_is_not_refused_fit_in_shared_memory():
    for channels, width in itertools.product(range(1, 9), range(128, 16_384, 128)):
        if shapes.unsupported((1, channels, width)) is not None:
            continue
        for dtype, backward in itertools.product((jnp.bfloat16, jnp.float32), (False, True)):
            plan = shapes.plan(8191, channels, width, dtype, dtype, reads=True, backward=backward)
            token = shapes.token_bytes(channels, width, dtype, dtype, backward=backward, reads=True)
            lines = 4 * plan.box * shapes.padded(shapes.rows(channels, backward)) * plan.warpgroups
            assert plan.stages * token + lines < SHARED_MEMORY_PER_BLOCK, (channels, width, dtype)
            assert plan.warpgroups * plan.boxes * plan.box == width


@needs_compiler
@pytest.mark.parametrize("channels, width", [(8, 512), (7, 256), (5, 640)])
def test_all_planned_blocks_fit_at_once(channels, width):
    _, this, *_ = cases._rewrites("x", cases.Shape(40_000, channels, width))
    planned = shapes.plan(40_000, channels, width, "bfloat16", "bfloat16", reads=True).blocks_per_multiprocessor
    assert hopper.resources(this.function, *this.arguments).blocks_per_multiprocessor >= planned


# At the edges of what is taken: the most registers, the most boxes.
@needs_compiler
@pytest.mark.parametrize("channels, width", [(8, 2048), (4, 3840), (2, 6144), (1, 8192)])
def test_the_largest_states_compile_without_spilling(channels, width):
    (*_, this) = (c for c in cases._rewrites("x", cases.Shape(4096, channels, width)) if c.kernel.endswith("reverse"))
    assert hopper.resources(this.function, *this.arguments).spill_bytes == 0
