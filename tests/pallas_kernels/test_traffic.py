"""The byte counter: exact on kernels whose bytes can be counted by hand, and loud where it cannot know."""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.traffic import Traffic, bytes_moved
from pallas_kernels.traffic.scalars import evaluate
from pallas_kernels.traffic.schedule import Event, bytes_in_flight
from tests.pallas_kernels.scale_kernel import arguments, scale

WIDTH = 256
ROW = WIDTH * 2  # bytes, bfloat16
BLOCKS = 8


def count(number: int, **options) -> Traffic:
    return bytes_moved(functools.partial(scale, **options), *arguments(number, WIDTH))


def move(body, x_rows=BLOCKS, scratch=(), **options) -> Traffic:
    """Counts a kernel of eight blocks: body(x, out, *scratch)."""
    x, out = (jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32) for rows in (x_rows, BLOCKS))
    options = {"grid": (BLOCKS,), "grid_names": ("block",)} | options
    return bytes_moved(lambda x: plgpu.kernel(body, out_type=out, scratch_types=scratch, **options)(x), x)


RING = (plgpu.SMEM((WIDTH,), jnp.float32), plgpu.Barrier(num_arrivals=1))


def test_the_kernel_that_is_counted_computes_what_it_says():
    x = jax.random.normal(jax.random.key(0), (8, 128), jnp.bfloat16)
    factor = jnp.arange(1.0, 129.0)
    got = scale(x, factor, blocks=4, rows=1, interpret=plgpu.InterpretGPUParams())
    np.testing.assert_array_equal(got, (x.astype(jnp.float32) * factor).astype(x.dtype))


# Not a multiple of the blocks or of the rows, fewer rows than blocks, one row, and a size that is used.
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("number", [37, 40, 3, 1, 32768])
def test_every_byte_of_a_persistent_pipelined_kernel_is_counted_once(number, rows):
    traffic = count(number, rows=rows, blocks=BLOCKS)
    factors = BLOCKS * WIDTH * 4
    assert traffic.per_operand == {
        "input 0": (number * ROW, 0),
        "input 1": (factors, 0),
        "output 0": (0, number * ROW),
    }
    assert (traffic.loaded, traffic.stored) == (number * ROW + factors, number * ROW)
    assert traffic.moved == 2 * number * ROW + factors


@pytest.mark.parametrize("number", [37, 3])
def test_a_second_load_costs_exactly_its_bytes(number):
    assert count(number, loads=2).loaded - count(number).loaded == number * ROW
    assert count(number, loads=2).stored == count(number).stored


@pytest.mark.parametrize(("stages", "loads"), [(1, 1), (3, 1), (4, 2)])
def test_the_bytes_in_flight_are_those_of_the_ring_but_for_the_tile_in_use(stages, loads):
    assert count(1000, stages=stages, loads=loads).in_flight == (stages - 1) * loads * ROW


def test_a_condition_on_the_program_is_followed():
    def body(x, out, row, barrier):
        block = lax.axis_index("block")

        @pl.when(lax.rem(block, 3) == 1)  # blocks 1, 4 and 7
        def _():
            plgpu.copy_gmem_to_smem(x.at[block], row, barrier)
            plgpu.barrier_wait(barrier)

        lax.cond(block < 2, lambda: plgpu.copy_smem_to_gmem(row, out.at[block]), lambda: None)

    traffic = move(body, scratch=RING)
    assert (traffic.loaded, traffic.stored) == (3 * 4 * WIDTH, 2 * 4 * WIDTH)


def test_the_predicate_of_a_copy_is_followed():
    def body(x, out, row, barrier):
        block = lax.axis_index("block")
        plgpu.copy_gmem_to_smem(x.at[block], row, barrier, predicate=block > 5)
        plgpu.copy_smem_to_gmem(row, out.at[block], predicate=block == 0)

    traffic = move(body, scratch=RING)
    assert (traffic.loaded, traffic.stored) == (2 * 4 * WIDTH, 4 * WIDTH)


def test_loops_within_loops_count_each_trip():
    def body(x, out, row, barrier):
        block = lax.axis_index("block")

        def inner(j, total):
            plgpu.copy_gmem_to_smem(x.at[j], row, barrier)
            plgpu.barrier_wait(barrier)
            return total + j

        def outer(i, total):
            return lax.fori_loop(0, i, inner, total)  # the trip count is the outer counter

        total = lax.fori_loop(0, 4, outer, jnp.int32(0))  # 0 + 1 + 2 + 3 trips; the counters add up to 0 + 0 + 1 + 3
        pl.when(total == 4)(lambda: plgpu.copy_smem_to_gmem(row, out.at[block]))

    traffic = move(body, scratch=RING)
    assert (traffic.loaded, traffic.stored) == (BLOCKS * 6 * 4 * WIDTH, BLOCKS * 4 * WIDTH)


def test_while_loops_end_for_each_program_on_its_own():
    def body(x, out, row, barrier):
        def step(i):
            plgpu.copy_gmem_to_smem(x.at[0, pl.ds(0, 128)], row.at[pl.ds(0, 128)], barrier)
            plgpu.barrier_wait(barrier)
            return i // 2

        lax.while_loop(lambda i: i > 0, step, lax.axis_index("block"))  # as many trips as the index has bits

    assert move(body, scratch=RING).loaded == sum(i.bit_length() for i in range(BLOCKS)) * 128 * 4


def test_direct_accesses_count_once_per_warpgroup_and_an_old_value_only_if_it_is_used():
    def body(x, out):
        block = lax.axis_index("block")
        out[block] = x[block] + 1.0

    assert (move(body).loaded, move(body).stored) == (BLOCKS * 4 * WIDTH,) * 2
    twice = move(body, num_threads=2, thread_name="warpgroup")
    assert (twice.loaded, twice.stored) == (2 * BLOCKS * 4 * WIDTH,) * 2

    def swaps(x, out):
        block = lax.axis_index("block")
        out[0] = jax.ref.swap(out, block, x[0])

    traffic = move(swaps)
    assert traffic.per_operand["output 0"] == (BLOCKS * 4 * WIDTH, 2 * BLOCKS * 4 * WIDTH)


def test_a_grid_of_two_axes_and_a_flat_index_over_both():
    def body(x, out):
        plain = lax.axis_index("i") * 4 + lax.axis_index("j")
        pl.when(plain == lax.axis_index(("i", "j")))(lambda: out.__setitem__(plain, x[plain]))

    assert move(body, grid=(2, 4), grid_names=("i", "j")).loaded == BLOCKS * 4 * WIDTH


def test_the_loop_around_a_kernel_multiplies():
    def steps(x, factor):
        return lax.fori_loop(0, 5, lambda _, x: scale(x, factor), x)

    once, five = count(37), bytes_moved(steps, *arguments(37, WIDTH))
    assert (five.loaded, five.stored) == (5 * once.loaded, 5 * once.stored)


def test_the_branch_for_gpus_counts_and_a_function_without_a_kernel_is_refused():
    def either(x, factor):
        return lax.platform_dependent(x, factor, cpu=lambda x, factor: x, cuda=scale)

    assert bytes_moved(either, *arguments(37, WIDTH)) == count(37)
    with pytest.raises(NotImplementedError, match="how often cond runs"):
        bytes_moved(lambda x, factor: lax.cond(x[0, 0] > 0, scale, lambda x, _: x, x, factor), *arguments(37, WIDTH))
    with pytest.raises(ValueError, match="no Mosaic GPU kernel"):
        bytes_moved(jnp.sin, jax.ShapeDtypeStruct((3,), jnp.float32))


def bad_condition(x, out, row, barrier):
    pl.when(x[0, 0] > 0)(lambda: plgpu.copy_gmem_to_smem(x.at[0], row, barrier))


def bad_loop(x, out, row, barrier):
    def step(i):
        plgpu.copy_gmem_to_smem(x.at[0], row, barrier)
        return i + x[0, 0].astype(jnp.int32)

    lax.while_loop(lambda i: i < 4, step, jnp.int32(0))


def bad_predicate(x, out, row, barrier):
    plgpu.copy_gmem_to_smem(x.at[0], row, barrier, predicate=x[0, 0] > 0)


def bad_prefetch(x, out, row, barrier):
    plgpu.async_prefetch(x.at[0])


def bad_barrier(x, out, row, barrier):
    plgpu.barrier_test(barrier)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (bad_condition, "condition that depends on data"),
        (bad_loop, "loop .* depends on data"),
        (bad_predicate, "predicate of a copy depends on data"),
        (bad_prefetch, "async_prefetch may move bytes"),
        (bad_barrier, "barrier_test may move bytes"),
    ],
)
def test_what_could_hide_a_copy_raises(body, message):
    with pytest.raises(NotImplementedError, match=message):
        move(body, scratch=RING)


def test_data_may_decide_what_is_computed():
    def body(x, out):
        block = lax.axis_index("block")
        row = x[block]
        out[block] = lax.cond(jnp.sum(row) > 0, lambda: row, lambda: -row)

    assert move(body).moved == 2 * BLOCKS * 4 * WIDTH


def test_a_producer_runs_ahead_as_far_as_its_barriers_let_it():
    """Warp-specialised: one warpgroup loads into a ring of three, another computes and hands the places back."""

    def body(x, out, ring, loaded, free):
        block = lax.axis_index("block")

        @pl.when(lax.axis_index("warpgroup") == 0)
        def _():
            def load(step, _):
                slot = lax.rem(step, 3)
                pl.when(step >= 3)(lambda: plgpu.barrier_wait(free.at[slot]))
                plgpu.copy_gmem_to_smem(x.at[block + step * BLOCKS], ring.at[slot], loaded.at[slot])
                return ()

            lax.fori_loop(0, 20, load, ())

        @pl.when(lax.axis_index("warpgroup") == 1)
        def _():
            def use(step, _):
                slot = lax.rem(step, 3)
                plgpu.barrier_wait(loaded.at[slot])
                out[block] = ring[slot]
                plgpu.barrier_arrive(free.at[slot])
                return ()

            lax.fori_loop(0, 20, use, ())

    scratch = (
        plgpu.SMEM((3, WIDTH), jnp.float32),
        plgpu.Barrier(num_arrivals=1, num_barriers=3),
        plgpu.Barrier(num_arrivals=1, num_barriers=3),
    )
    traffic = move(body, 20 * BLOCKS, scratch=scratch, num_threads=2, thread_name="warpgroup")
    assert traffic.loaded == 20 * BLOCKS * 4 * WIDTH
    assert traffic.in_flight == 2 * 4 * WIDTH


@pytest.mark.parametrize("specialised", [False, True])
def test_the_pipelines_of_jax_are_understood(specialised):
    """16 tiles a block, four places in the ring: three in flight while one is in use, and every byte counts once."""
    tile, rows = (8, 128), 8 * 16 * BLOCKS

    def use(_, x, out):
        out[...] = x[...] * 2

    def body(x, out):
        spec = plgpu.BlockSpec(tile, lambda i: (lax.axis_index("block") * 16 + i, 0))
        options = {"grid": (16,), "in_specs": [spec], "out_specs": [spec], "max_concurrent_steps": 4}
        if specialised:
            more = {"num_compute_wgs": 1, "memory_registers": 40, "wg_axis": "warpgroup"}
            plgpu.emit_pipeline_warp_specialized(use, **options, **more)(x, out)
        else:
            plgpu.emit_pipeline(use, **options)(x, out)

    x = jax.ShapeDtypeStruct((rows, 128), jnp.float32)
    options = {"num_threads": 2, "thread_name": "warpgroup"} if specialised else {}
    kernel = plgpu.kernel(body, out_type=x, grid=(BLOCKS,), grid_names=("block",), **options)
    traffic = bytes_moved(lambda x: kernel(x), x)
    assert (traffic.loaded, traffic.stored) == (rows * 128 * 4,) * 2
    assert traffic.in_flight == 3 * 8 * 128 * 4


def test_a_block_that_would_hang_is_refused():
    with pytest.raises(ValueError, match="hangs"):
        bytes_in_flight([[Event("issue", "a", 8, arrivals=2), Event("wait", "a", arrivals=2), Event("read")]])
    assert bytes_in_flight([[]]) == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: a + b,
        lambda a, b: a - b,
        lambda a, b: a * b,  # wraps around
        lax.div,
        lax.rem,
        jnp.floor_divide,
        jnp.mod,
        lambda a, b: jnp.clip(a, -5, b),
        lambda a, b: jnp.where(a > b, a, b // 3),
        lambda a, b: (a & b) | (a ^ ~b),
        lambda a, b: (a << 3) + (b >> 2) + lax.shift_right_logical(a, 5),
        lambda a, b: jnp.sign(a) * jnp.abs(b) + jnp.minimum(a, -b) + a**3,
        lambda a, b: ((a <= b) & (b != 3) | (a >= 7)).astype(jnp.int32),
        lambda a, b: a.astype(jnp.uint8).astype(jnp.int32) + b,
    ],
)
def test_scalars_have_the_values_that_jax_gives_them(function):
    rng = np.random.default_rng(0)
    a, b = rng.integers(-(2**30), 2**30, (2, 50)).astype(np.int32) // rng.choice([1, 2**26], (2, 50)).astype(np.int32)
    b[b == 0] = 3

    def run(jaxpr, values):
        env = dict(zip(jaxpr.jaxpr.invars, values, strict=True))
        for equation in jaxpr.jaxpr.eqns:
            inputs = [np.asarray(v.val) if hasattr(v, "val") else env[v] for v in equation.invars]
            inner = equation.params.get("jaxpr")
            (env[equation.outvars[0]],) = run(inner, inputs) if inner else [evaluate(equation, inputs)]
        return [env[var] for var in jaxpr.jaxpr.outvars]

    (got,) = run(jax.make_jaxpr(function)(np.int32(0), np.int32(1)), [a, b])
    np.testing.assert_array_equal(got, jax.vmap(function)(a, b))
