"""The Transformer: causal, the same however the scan is unrolled, a tied head in float32."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddl_jax.config import ResidualConfig, TransformerConfig
from ddl_jax.parameters import at
from ddl_jax.transformer import Transformer
from ddl_jax.transformer.model import head
from tests.quick import QUICK

SIZES = {"layers": 3, "width": 16, "heads": 2, "vocab_size": 29}
KINDS = {
    "additive": ResidualConfig(kind="additive"),
    "delta": ResidualConfig(value_channels=2),
    "token": ResidualConfig(value_channels=2, reader="token"),
    "official": ResidualConfig(value_channels=2, preset="official_code"),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@functools.cache
def make(kind, **settings):
    return Transformer(TransformerConfig(residual=KINDS[kind], **SIZES | settings), rngs=nnx.Rngs(0))


def tokens():
    return np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 8))


@every_kind
def test_scanned_equals_a_loop_over_the_stream_interface_at_every_unrolling(kind):
    model = make(kind)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def loop(model, tokens):
        state = model.stream.expand(model.embedding[...][tokens])
        for layer in range(SIZES["layers"]):
            for i, (norm, sublayer) in enumerate(at(model.blocks, layer).sublayers()):
                x = model.stream.read(state, 2 * layer + i)
                context = norm(x)
                state = model.stream.write(state, sublayer(context), context, x, 2 * layer + i)
        return model.final_norm(model.stream.reduce(state))

    expected = loop(model, tokens())
    assert np.std(expected) > 0.1
    features = jax.jit(
        lambda model, tokens, unroll: model.features(tokens, unroll=unroll), static_argnums=2, compiler_options=QUICK
    )
    for unroll in (1, 3):
        np.testing.assert_allclose(features(model, tokens(), unroll), expected, atol=1e-5)  # float32, another order


@every_kind
def test_no_logit_depends_on_a_later_token_and_every_one_on_all_earlier(kind):
    model = make(kind)
    logits = jax.jit(lambda model, tokens: model(tokens), compiler_options=QUICK)
    base = np.asarray(logits(model, tokens()))
    for changed in range(8):
        other = tokens()
        other[0, changed] = (other[0, changed] + 1) % SIZES["vocab_size"]
        difference = np.max(np.abs(np.asarray(logits(model, other)) - base), axis=-1)
        assert not difference[0, :changed].any()
        assert np.all(difference[0, changed:] > 0)
        assert not difference[1].any()  # the other sequence


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_float32_and_features_of_the_compute_dtype(dtype):
    model = make("delta", compute_dtype=dtype, state_dtype=dtype)
    assert jax.eval_shape(lambda: model(tokens())).dtype == jnp.float32
    features = jax.eval_shape(lambda: model.features(tokens()))
    assert (features.shape, features.dtype) == ((2, 8, SIZES["width"]), jnp.dtype(dtype))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(nnx.state(model)))  # the master parameters


def test_compute_and_state_dtype_are_two_settings():
    model = make("delta", compute_dtype="bfloat16", state_dtype="float32")
    assert model.stream.dtype == jnp.float32 and model.final_norm.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        model(tokens()), make("delta")(tokens()), atol=0.05
    )  # bfloat16 products of logits below 0.5


def test_the_head_is_the_embedding():
    model = make("delta")
    expected = np.asarray(model.features(tokens())) @ np.asarray(model.embedding[...]).T
    np.testing.assert_allclose(model(tokens()), expected, atol=1e-6)


def test_logits_are_not_rounded_to_the_compute_dtype():
    features, weight = (jax.random.normal(jax.random.key(i), (4, 64)).astype(jnp.bfloat16) for i in range(2))
    expected = np.asarray(features, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(head(features, weight), expected, atol=1e-5 * np.abs(expected).max())


def test_mup_scales_logits_by_1024_over_the_width():
    plain, scaled = make("delta"), make("delta", logit_scale="mup")
    np.testing.assert_allclose(scaled(tokens()), 1024 / SIZES["width"] * plain(tokens()), rtol=1e-5, atol=1e-6)


def test_models_that_differ_in_the_stream_alone_start_from_the_same_other_parameters():
    first, *others = (nnx.state((make(kind).embedding, make(kind).blocks)) for kind in KINDS)
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)
    assert float(jnp.std(make("delta").embedding[...])) == pytest.approx(0.02, rel=0.2)


def test_blocks_start_differently():
    weights = np.asarray(make("delta").blocks.mlp.input[...])
    assert np.all(np.std(weights, axis=0) > 0)
