"""The token read's kernels on a GPU: the interpreter's checks at more tokens, and what only a GPU can get wrong."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import token_read
from tests.pallas_kernels import test_token_read as interpreted
from tests.pallas_kernels.test_token_read import Case

pytestmark = pytest.mark.hopper

# (sequences, tokens, channels, width, taps, dtype, multiprocessors): runs, groups and sequences end anywhere.
CASES = [
    Case(3, 1367, 4, 768, 4, "bfloat16", 132),
    Case(2, 1024, 4, 1024, 4, "bfloat16", 132),
    Case(1, 4099, 1, 768, 4, "bfloat16", 132),
    Case(61, 9, 8, 128, 8, "float32", 132),
    Case(5, 501, 3, 384, 3, "float32", 132),
    Case(1, 1031, 8, 2048, 8, "bfloat16", 132),
    Case(1, 1031, 2, 640, 1, "float32", 132),
    Case(1, 1, 3, 128, 8, "float32", 132),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_cotangents_equal_the_oracle(case):
    interpreted.assert_close(interpreted.results(case, "pallas"), case)


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[4]], ids=str)
def test_a_nan_stays_within_its_window_and_its_sequence(case):
    interpreted.test_a_nan_stays_within_its_window_and_its_sequence(None, "pallas", case)


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_causality_is_exact(case):
    interpreted.test_causality_is_exact(None, "pallas", case)


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_the_same_bits_every_time(case):
    arguments = interpreted.draw(case)
    for _ in range(10):
        for left, right in zip(
            interpreted.results(case, "pallas"), interpreted.differentiated(case, "pallas")(*arguments), strict=True
        ):
            assert jnp.array_equal(left, right)


def test_two_hundred_steps_of_training_lose_what_xla_loses():
    """Weights donated to each step of gradient descent towards what other weights read."""
    state, weights, _ = interpreted.draw(Case(3, 173, 4, 256, 4, "float32", 132))
    target = token_read(state, weights[::-1].copy(), implementation="xla")

    def train(implementation):
        @functools.partial(jax.jit, donate_argnums=0)
        def step(weights):
            def loss(weights):
                return jnp.mean((token_read(state, weights, implementation=implementation) - target) ** 2)

            value, gradient = jax.value_and_grad(loss)(weights)
            return weights - 20 * gradient, value

        a, losses = jnp.array(weights), []
        for _ in range(200):
            a, value = step(a)
            losses.append(value)
        return np.array(losses)

    ours, theirs = train("pallas"), train("xla")
    assert np.isfinite(ours).all() and ours[-1] < 0.5 * ours[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-6 * theirs[0])
