"""The Mosaic GPU kernels of the rewrite, interpreted: against float64, token by token, and without a race.

The interpreter fills all memory with NaN before a kernel starts (whatever a kernel fails to write, stays so), and
raises where two accesses are not ordered by a barrier, and where one is out of bounds.
"""

import dataclasses
import functools

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rewrite import shapes
from tests.pallas_kernels.oracle import (
    BFLOAT16,
    EPSILON,
    NAMES,
    TOLERANCE,
    analytic_gradients,
    assert_within,
    draw,
    oracle,
    scales,
)

BF16, FP32 = jnp.bfloat16, jnp.float32


@dataclasses.dataclass(frozen=True)
class Shape:
    tokens: int
    channels: int
    width: int
    state: type = FP32
    branch: type = FP32
    erase: bool = True
    reads: bool = True
    reverse: bool = False
    stages: int = 3

    def __str__(self):
        words = [f"{self.tokens}x{self.channels}x{self.width}", self.state.__name__, self.branch.__name__]
        words += ["write_only"] * (not self.erase) + ["alone"] * (not self.reads) + ["reverse"] * self.reverse
        return "-".join([*words, f"{self.stages}_stages"])


# On four blocks, so that 17 tokens go around a ring of three slots more than once, unevenly. Two warpgroups where
# V d > 4096, lines of 128 instead of 256 features where d is an odd multiple of 128.
SHAPES = [
    Shape(17, 4, 256),
    Shape(13, 2, 128, BF16, BF16, reverse=True),
    Shape(9, 1, 128, stages=2),
    Shape(9, 2, 256, reverse=True, stages=1),
    Shape(7, 2, 384, BF16, BF16),
    Shape(5, 8, 128, BF16, FP32, reverse=True),
    Shape(5, 3, 640, FP32, BF16),
    Shape(4, 4, 768, BF16, BF16, reverse=True),
    Shape(9, 8, 1024, stages=2),
    Shape(5, 8, 1024, BF16, BF16, erase=False, reverse=True),
    Shape(4, 5, 1024, BF16, BF16, reads=False),
    Shape(1, 4, 768),
    Shape(9, 4, 256, erase=False, reads=False),
    Shape(6, 2, 256, reads=False, reverse=True),
    Shape(6, 7, 256, erase=False),
    Shape(4, 1, 2048, BF16, BF16),
]


@pytest.fixture
def four_blocks(monkeypatch):
    """As if the GPU had one multiprocessor with four blocks, and rings of so many slots."""
    cut = shapes.plan
    passes.clear_cache()  # programs of other plans

    def set_stages(stages):
        def plan(tokens, *arguments, **flags):
            planned = cut(tokens, *arguments, **flags)
            return dataclasses.replace(planned, blocks=min(4, tokens), stages=stages)

        monkeypatch.setattr(shapes, "plan", plan)

    return set_stages


@functools.partial(jax.jit, static_argnames=("erase", "reverse"))
def passes(arguments, cotangents, *, erase, reverse=False):
    """Forward's outputs (with the discrepancy) and backward's, by the kernels."""
    from pallas_kernels.rewrite import mosaic_gpu

    interpret = mosaic_gpu.interpreter()
    state, branch, value, gate, *weights = arguments
    forward = mosaic_gpu.forward(*arguments, epsilon=EPSILON, erase=erase, with_discrepancy=True, interpret=interpret)
    state, value = (forward[0], forward[-1]) if reverse else (state, value)
    backward = mosaic_gpu.backward(
        *(state, branch, value, gate, weights[0] if weights else None, *cotangents),
        epsilon=EPSILON,
        erase=erase,
        reverse=reverse,
        interpret=interpret,
    )
    return forward, backward


def arguments_of(shape, seed, **sizes):
    (X, h, v, β, a), (d_new, d_read) = draw(
        np.random.default_rng(seed), (shape.tokens,), shape.channels, shape.width, dtype=shape.state, **sizes
    )
    # Rounded first, so that the oracle sees the numbers that the kernel sees.
    d_new, d_read = (jnp.asarray(c, shape.state) for c in (d_new, d_read))
    arguments = [X, jnp.asarray(h, shape.branch), v, β] + [a] * shape.reads
    return arguments, (d_new, d_read if shape.reads else None)


def check(shape, seed, **sizes):
    arguments, cotangents = arguments_of(shape, seed, **sizes)
    forward, backward = passes(arguments, cotangents, erase=shape.erase, reverse=shape.reverse)
    X, h, v, β, *a = arguments
    a = a[0] if a else np.zeros((shape.channels, shape.width), np.float32)
    d_new, d_read = cotangents[0], np.zeros_like(h) if cotangents[1] is None else cotangents[1]
    whole = (X, h, v, β, a)
    new_scale, read_scale, gradient_scales, weights_scale = scales(*whole, d_new, d_read)
    new, read = oracle(*whole, shape.erase)

    # What is stored in bfloat16 is rounded; all else is float32.
    state_rounding = BFLOAT16 if shape.state == BF16 else 0.0
    branch_rounding = BFLOAT16 if shape.branch == BF16 else 0.0
    assert_within(forward[0], new, new_scale, TOLERANCE + state_rounding, "state'")
    if shape.reads:
        assert_within(forward[1], read, read_scale, TOLERANCE + state_rounding, "read")
    expected = analytic_gradients(*whole, d_new, d_read, shape.erase)
    if shape.reverse:
        restored, *backward = backward
        # The reversible pass starts from the rounded X', and its error is carried into what depends on X.
        assert_within(restored, X, new_scale, TOLERANCE + 2 * state_rounding, "restored state")
    extra = 2 * state_rounding if shape.reverse else 0.0
    roundings = (state_rounding, branch_rounding, 0.0, 0.0, 0.0)
    each = zip(NAMES, backward, expected, (*gradient_scales, weights_scale), roundings, strict=False)
    for name, actual, target, scale, rounding in each:
        assert_within(actual, target, scale, TOLERANCE + rounding + extra, f"gradient of {name}")


VALUES = hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    state=st.floats(-3, 3),
    branch=st.one_of(st.just(-np.inf), st.floats(-8, 8)),
    value=st.floats(-3, 3),
    gate=st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(1e-6, 2)),
)


# The first example is all zeros and ones; a shape is compiled once for all.
@hypothesis.settings(max_examples=2, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@VALUES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_equal_the_oracle(four_blocks, shape, seed, state, branch, value, gate):
    four_blocks(shape.stages)
    check(shape, seed, state=10**state, branch=10**branch, value=10**value, gate=gate)


@hypothesis.settings(max_examples=6)
@VALUES
@pytest.mark.parametrize("shape", [Shape(4, 2, 256), Shape(4, 2, 128, BF16, BF16, erase=False, reverse=True)], ids=str)
def test_kernels_equal_the_oracle_at_any_size_of_the_arguments(shape, seed, state, branch, value, gate):
    check(shape, seed, state=10**state, branch=10**branch, value=10**value, gate=gate)


@pytest.mark.parametrize("reverse", [False, True])
def test_kernels_equal_the_oracle_around_the_guard(reverse):
    for branch in (0.0, 1e-7, 1e-6, 1e-5):  # ‖h‖ from nothing to 16 ε
        check(Shape(4, 2, 256, reverse=reverse), 3, branch=branch)


@pytest.mark.parametrize("poisoned", ["state", "branch", "value", "gate"])
def test_a_nan_in_one_token_stays_in_that_token(poisoned):
    shape = Shape(5, 2, 256)
    clean, cotangents = arguments_of(shape, 1)
    dirty = [np.array(a) for a in clean]
    entry = dirty[NAMES.index(poisoned)]
    entry[(3,) + (0,) * (entry.ndim - 1)] = np.nan
    before = passes(clean, cotangents, erase=True)
    after = passes(dirty, cotangents, erase=True)
    others = np.arange(5) != 3
    # The last of backward is the gradient of the weights, a sum over tokens.
    for left, right in zip((*before[0], *before[1][:-1]), (*after[0], *after[1][:-1]), strict=True):
        np.testing.assert_array_equal(np.asarray(left)[others], np.asarray(right)[others])
    assert np.isnan(np.asarray(after[0][0])[3]).any()


def test_gradients_of_weights_do_not_depend_on_when_blocks_run(four_blocks):
    four_blocks(3)
    arguments, cotangents = arguments_of(Shape(9, 2, 256), 2)
    first, second = (passes(arguments, cotangents, erase=True)[1][-1] for _ in range(2))
    np.testing.assert_array_equal(first, second)
