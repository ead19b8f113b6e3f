"""The chunked cross-entropy against the plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddl_jax.training import loss
from ddl_jax.training.loss import cross_entropy

VOCAB, WIDTH, CHUNK = 37, 8, 8


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(loss, "CHUNK", CHUNK)


def plain(features, weight, targets):
    logits = jnp.einsum("td,vd->tv", features, weight, preferred_element_type=jnp.float32)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(targets, 0)[:, None], axis=-1)[:, 0]
    return -jnp.sum(jnp.where(targets == -1, 0.0, chosen))


def draw(tokens, ignored=0.3):
    rng = np.random.default_rng(tokens)
    features, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((tokens, WIDTH), (VOCAB, WIDTH)))
    return features, weight, np.where(rng.random(tokens) < ignored, -1, rng.integers(0, VOCAB, tokens))


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 29])
def test_equals_plain_log_softmax_in_value_and_gradients(tokens):
    features, weight, targets = draw(tokens)
    value, gradients = jax.value_and_grad(cross_entropy, (0, 1))(features, weight, targets)
    expected, targets_of = jax.value_and_grad(plain, (0, 1))(features, weight, targets)
    np.testing.assert_allclose(value, expected, rtol=1e-5)  # float32 sums in another order
    np.testing.assert_allclose(cross_entropy(features, weight, targets), expected, rtol=1e-5)
    for actual, target in zip(gradients, targets_of, strict=True):
        np.testing.assert_allclose(actual, target, atol=1e-5 * max(np.max(np.abs(target)), 1e-3))


def test_the_gradient_is_scaled_by_what_follows():
    features, weight, targets = draw(13)
    scaled = jax.grad(lambda f, w: 3 * cross_entropy(f, w, targets) ** 2, (0, 1))(features, weight)
    expected = jax.grad(lambda f, w: 3 * plain(f, w, targets) ** 2, (0, 1))(features, weight)
    for actual, target in zip(scaled, expected, strict=True):
        np.testing.assert_allclose(actual, target, atol=1e-5 * np.max(np.abs(target)))


def test_nothing_counted_is_zero_with_zero_gradients():
    features, weight, _ = draw(13)
    targets = np.full(13, -1)
    value, gradients = jax.value_and_grad(cross_entropy, (0, 1))(features, weight, targets)
    assert value == 0
    assert not any(np.any(gradient) for gradient in gradients)


def test_labels_are_not_shifted_again():
    """The target at a position is the token to predict there: the pipeline has shifted already."""
    targets = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5])
    features = 50 * np.eye(VOCAB, dtype=np.float32)[targets]
    assert cross_entropy(features, np.eye(VOCAB, dtype=np.float32), targets) < 1e-3
    assert cross_entropy(features, np.eye(VOCAB, dtype=np.float32), np.roll(targets, 1)) > 100


def test_no_label_smoothing():
    """A sure and right prediction costs nothing; smoothing would put a floor under the loss."""
    features = 80 * np.eye(VOCAB, dtype=np.float32)[:5]
    assert cross_entropy(features, np.eye(VOCAB, dtype=np.float32), np.arange(5)) == 0


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary():
    features, weight, targets = draw(13, ignored=0)
    np.testing.assert_allclose(cross_entropy(0 * features, weight, targets), 13 * np.log(VOCAB), rtol=1e-6)


def test_large_logits_do_not_overflow():
    features, weight, targets = draw(9, ignored=0)
    value, gradients = jax.value_and_grad(cross_entropy, (0, 1))(1e4 * features, weight, targets)
    assert np.isfinite(value) and all(np.isfinite(gradient).all() for gradient in gradients)


def shapes_in(jaxpr):
    """The shapes of every value in a jaxpr and the jaxprs inside it."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield variable.aval.shape
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda p: hasattr(p, "eqns")):
            if hasattr(parameter, "eqns"):
                yield from shapes_in(parameter)


@pytest.mark.parametrize("differentiated", [False, True])
def test_the_logits_of_all_tokens_never_exist_at_once(differentiated):
    tokens = 10 * CHUNK + 3
    function = jax.grad(cross_entropy, (0, 1)) if differentiated else cross_entropy
    found = set(shapes_in(jax.make_jaxpr(function)(*draw(tokens)).jaxpr))
    with_vocabulary = [shape for shape in found if VOCAB in shape]
    assert (CHUNK, VOCAB) in with_vocabulary  # 83 tokens are 11 chunks of 8
    assert max(int(np.prod(shape)) for shape in with_vocabulary) <= CHUNK * VOCAB


def test_bfloat16_features_keep_float32_logits_and_sums():
    features, weight, targets = draw(29)
    narrow = [jnp.asarray(a, jnp.bfloat16) for a in (features, weight)]
    value, gradients = jax.value_and_grad(cross_entropy, (0, 1))(*narrow, targets)
    expected = plain(*(a.astype(jnp.float32) for a in narrow), targets)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, expected, rtol=1e-5)  # products of bfloat16 are exact in float32
    assert [gradient.dtype for gradient in gradients] == [jnp.bfloat16, jnp.bfloat16]
