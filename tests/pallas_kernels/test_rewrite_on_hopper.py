"""The rewrite's kernels on a GPU: the interpreter's checks at more tokens, and what only a GPU can get wrong."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reversible_rewrite_and_read, rewrite_and_read
from pallas_kernels.rewrite import shapes
from tests.pallas_kernels import test_rewrite_kernels as interpreted
from tests.pallas_kernels.oracle import NAMES, draw
from tests.pallas_kernels.test_rewrite_kernels import BF16, Shape

pytestmark = pytest.mark.hopper
TOKENS = 1031  # a prime: blocks get different numbers of them


@pytest.fixture(autouse=True)
def without_the_interpreter(monkeypatch):
    """The kernels that the interpreter's checks run, compiled."""
    from pallas_kernels.rewrite import mosaic_gpu

    monkeypatch.setattr(mosaic_gpu, "interpreter", lambda *_: None)
    interpreted.passes.clear_cache()


@pytest.fixture
def four_blocks(monkeypatch):
    """So few that each has hundreds of tokens, and its ring goes round many times."""
    cut = shapes.plan
    monkeypatch.setattr(shapes, "plan", lambda *a, **k: dataclasses.replace(cut(*a, **k), blocks=4))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", interpreted.SHAPES, ids=str)
def test_kernels_equal_the_oracle(shape, reverse):
    interpreted.check(dataclasses.replace(shape, tokens=TOKENS, reverse=reverse), 0)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 132, 133])
def test_few_tokens_equal_the_oracle(tokens, reverse):
    interpreted.check(Shape(tokens, 4, 768, BF16, BF16, reverse=reverse), 1)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "shape", [Shape(TOKENS, 4, 768, BF16, BF16), Shape(TOKENS, 8, 1024), Shape(TOKENS, 1, 128)], ids=str
)
def test_long_walks_equal_the_oracle(four_blocks, shape, reverse):
    interpreted.check(dataclasses.replace(shape, reverse=reverse), 2)


@pytest.mark.parametrize(
    "sizes", [{"branch": 0.0}, {"branch": 1e-6}, {"state": 1e3, "value": 1e-3}, {"gate": 2.0}], ids=str
)
def test_arguments_of_any_size_equal_the_oracle(sizes):
    interpreted.check(Shape(TOKENS, 4, 256), 3, **sizes)


@pytest.mark.parametrize("poisoned", NAMES[:4])
def test_a_nan_in_one_token_stays_in_that_token(poisoned):
    interpreted.test_a_nan_in_one_token_stays_in_that_token(poisoned)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", [Shape(9001, 4, 768, BF16, BF16), Shape(9001, 8, 1024)], ids=str)
def test_the_same_bits_every_time(shape, reverse):
    arguments, cotangents = interpreted.arguments_of(shape, 4)
    first = jax.tree.leaves(interpreted.passes(arguments, cotangents, erase=True, reverse=reverse))
    for _ in range(10):
        for left, right in zip(
            first,
            jax.tree.leaves(interpreted.passes(arguments, cotangents, erase=True, reverse=reverse)),
            strict=True,
        ):
            assert jnp.array_equal(left, right)


def test_two_hundred_calls_on_a_donated_state_stay_with_xla():
    """Errors cannot grow: along the direction an edit contracts or reflects, and across it nothing changes."""
    (state, *_, weights), _ = draw(np.random.default_rng(5), (TOKENS,), 4, 768)
    edits = [draw(np.random.default_rng(seed), (TOKENS,), 4, 768)[0][1:4] for seed in range(8)]

    def run(implementation):
        @functools.partial(jax.jit, donate_argnums=0)
        def call(X, h, v, β):
            return rewrite_and_read(X, h, v, β, weights, implementation=implementation)

        X = jnp.array(state)
        for number in range(200):
            X, x = call(X, *edits[number % len(edits)])
        return X, x

    for ours, theirs in zip(run("pallas"), run("xla"), strict=True):
        assert np.max(np.abs(ours - theirs)) < 1e-4 * np.max(np.abs(theirs))


@pytest.mark.parametrize("reversible", [False, True])
def test_two_hundred_steps_of_training_lose_what_xla_loses(reversible):
    """Three layers of nothing but rewrites, their parameters donated to each step of gradient descent."""
    layers, tokens, V, d = 3, 257, 2, 256
    drawn = [draw(np.random.default_rng(seed), (tokens,), V, d)[0] for seed in range(layers)]
    start = [jnp.stack([arguments[i] for arguments in drawn]) for i in (1, 2, 4)]
    logits = jnp.zeros((layers, tokens))
    state, target = drawn[0][0], drawn[1][0]

    def loss(parameters, implementation):
        def layer(carry, of_layer):
            h, v, a, logit = of_layer
            X, S, x = carry
            arguments = (h + x, v, 2 * jax.nn.sigmoid(logit), a)
            if reversible:
                X, x, S = reversible_rewrite_and_read(X, S, *arguments, implementation=implementation)
            else:
                X, x = rewrite_and_read(X, *arguments, implementation=implementation)
            return (X, S, x / V), None

        (X, S, x), _ = jax.lax.scan(layer, (state, jnp.zeros_like(state), jnp.zeros((tokens, d))), parameters)
        if reversible:
            X = _seal(X, S)
        return jnp.mean((X - target) ** 2) + jnp.mean(x**2)

    def train(implementation):
        @functools.partial(jax.jit, donate_argnums=0)
        def step(parameters):
            value, gradients = jax.value_and_grad(loss)(parameters, implementation)
            return jax.tree.map(lambda p, g: p - 20 * g, parameters, gradients), value

        parameters, losses = tuple(jnp.array(p) for p in (*start, logits)), []
        for _ in range(200):
            parameters, value = step(parameters)
            losses.append(value)
        return np.array(losses)

    ours, theirs = train("pallas"), train("xla")
    assert np.isfinite(ours).all() and ours[-1] < 0.95 * ours[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)


@jax.custom_vjp
def _seal(X, S):
    """X; the shadow's cotangent is X, from which the layers before are walked back."""
    return X


_seal.defvjp(lambda X, S: (X, X), lambda X, dX: (dX, X))
