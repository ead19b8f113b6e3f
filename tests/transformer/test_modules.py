"""RMSNorm, RoPE, attention and the MLP against direct float64 formulas, each part alone."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddl_jax.config import TransformerConfig
from ddl_jax.transformer.attention import Attention, rope_angles, rotate
from ddl_jax.transformer.mlp import Mlp, hidden_width
from ddl_jax.transformer.norm import RMSNorm
from tests import official

CONFIG = TransformerConfig(layers=3, width=12, heads=2, head_dim=8, vocab_size=16)
TOLERANCE = 1e-5  # float32 against float64, of the largest entry: a few hundred roundings of 6e-8


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * np.max(np.abs(expected)))


def inputs(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 1e3])
def test_rms_norm_has_its_epsilon_inside_the_mean(scale):
    norm = RMSNorm(12, jnp.float32)
    norm.gain[...] = jnp.linspace(0.5, 2, 12)
    x = scale * inputs(2, 5, 12)
    assert_close(norm(x), official.rms_norm(x.astype(np.float64), np.linspace(0.5, 2, 12)))


def test_rms_norm_computes_in_float32_and_returns_its_dtype():
    norm = RMSNorm(12, jnp.bfloat16)
    x = jnp.asarray(inputs(5, 12), jnp.bfloat16)
    result = norm(x)
    assert result.dtype == jnp.bfloat16
    exact = official.rms_norm(np.asarray(x, np.float64), 1.0)
    np.testing.assert_allclose(np.asarray(result, np.float64), exact, rtol=1.01 * 2**-8)  # rounded once, at the end


def test_rope_turns_halves_by_position_and_frequency():
    x = inputs(2, 9, 3, 8)
    assert_close(rotate(x, rope_angles(jnp.arange(9), 8)), official.rope(x.astype(np.float64)))


def test_rope_makes_scores_depend_on_distance_alone():
    q, k = inputs(2, 8)
    angles = rope_angles(jnp.arange(9), 8)
    turned = [rotate(np.broadcast_to(a, (1, 9, 1, 8)), angles)[0, :, 0] for a in (q, k)]
    scores = np.asarray(turned[0] @ turned[1].T)
    for distance in range(9):
        diagonal = np.diagonal(scores, -distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
    assert np.ptp(scores[:, 0]) > 0.1


def official_attention(module, c, order="rope first", qk_norm=True):
    """The equations over our module's weights; `order` is there to show that the other order differs."""
    qkv, output = (np.asarray(w[...], np.float64) for w in (module.qkv, module.output))
    if order == "rope first" and qk_norm:
        p = {f"attn.c_{n}.weight": qkv[:, i].reshape(12, -1).T for i, n in enumerate("qkv")}
        p |= {"attn.c_proj.weight": output.reshape(-1, 12).T}
        p |= {"attn.q_rms.weight": module.query_norm.gain[...], "attn.k_rms.weight": module.key_norm.gain[...]}
        if module.head_norm is not None:
            p |= {"attn.subln.weight": module.head_norm.gain[...]}
        if module.gate is not None:
            p |= {"attn.g_proj.weight": np.asarray(module.gate[...], np.float64).reshape(12, -1).T}
        return official.attention(p, c, 8)
    q, k, v = (np.einsum("btd,dhe->bthe", c, qkv[:, i]) for i in range(3))
    if qk_norm:
        q = official.rope(official.rms_norm(q, np.asarray(module.query_norm.gain[...])))
        k = official.rope(official.rms_norm(k, np.asarray(module.key_norm.gain[...])))
    else:
        q, k = official.rope(q), official.rope(k)
    scores = np.einsum("bthe,bshe->bhts", q, k) / np.sqrt(8)
    scores = np.where(np.tril(np.ones((c.shape[1],) * 2)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhts,bshe,hed->btd", weights, v, output)


def attention(**settings):
    config = TransformerConfig(layers=3, width=12, heads=2, head_dim=8, vocab_size=16, **settings)
    module = Attention(config, jnp.float32, nnx.Rngs(0))
    module.qkv[...] *= 5
    if config.qk_norm:  # RoPE and a norm commute as long as the gain is uniform
        module.query_norm.gain[...] = jnp.linspace(0.2, 3, 8)
        module.key_norm.gain[...] = jnp.linspace(2, 0.5, 8)
    if module.head_norm is not None:
        module.head_norm.gain[...] = jnp.linspace(0.5, 2, 8)
    if module.gate is not None:
        module.gate[...] *= 5
    return module


def test_attention_turns_queries_and_keys_before_it_normalises_them():
    module, c = attention(), inputs(2, 9, 12)
    actual = np.asarray(jax.jit(lambda m, c: m(c))(module, c))
    assert_close(actual, official_attention(module, c.astype(np.float64)))
    swapped = official_attention(module, c.astype(np.float64), order="norm first")
    assert np.max(np.abs(actual - swapped)) > 1e-2 * np.max(np.abs(actual))


def test_attention_without_qk_norm():
    module, c = attention(qk_norm=False), inputs(2, 9, 12)
    assert module.query_norm is None and module.key_norm is None
    assert_close(module(c), official_attention(module, c.astype(np.float64), qk_norm=False))


@pytest.mark.parametrize("settings", [{"head_norm": True}, {"output_gate": True}], ids=str)
def test_attention_with_a_norm_and_a_gate_of_what_heads_give(settings):
    module, c = attention(**settings), inputs(2, 9, 12)
    actual = np.asarray(jax.jit(lambda m, c: m(c))(module, c))
    assert_close(actual, official_attention(module, c.astype(np.float64)))
    module.head_norm.gain[...] = jnp.ones(8)
    assert np.max(np.abs(actual - module(c))) > 1e-2 * np.max(np.abs(actual))  # the gain has an effect


def test_the_mlp_is_swiglu():
    module, c = Mlp(CONFIG, nnx.Rngs(0)), inputs(2, 9, 12)
    w = np.asarray(module.input[...], np.float64)
    gate, linear = c @ w[:, 0], c @ w[:, 1]
    expected = (gate / (1 + np.exp(-gate)) * linear) @ np.asarray(module.output[...], np.float64)
    assert_close(module(c), expected)


@pytest.mark.parametrize("width, hidden", [(768, 2048), (1024, 2730), (12, 32)])
def test_hidden_width_of_the_mlp(width, hidden):
    assert hidden_width(width) == hidden


def test_deviations_at_the_start():
    config = TransformerConfig(layers=4, width=64, heads=4, vocab_size=512, output_gate=True)
    config = config.resolve()
    attention, mlp = Attention(config, jnp.float32, nnx.Rngs(0)), Mlp(config, nnx.Rngs(0))
    inner = 0.5 / 64**0.5
    for weight, std in (
        (attention.qkv, inner),
        (attention.gate, inner),
        (attention.output, inner / 2),
        (mlp.input, inner),
        (mlp.output, inner / 2),
    ):
        values = np.asarray(weight[...])
        assert abs(np.std(values) / std - 1) < 5 / (2 * values.size) ** 0.5  # five standard errors
        assert abs(np.mean(values)) < 5 * std / values.size**0.5
    np.testing.assert_array_equal(attention.query_norm.gain[...], 1)
