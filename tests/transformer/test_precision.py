"""Under bfloat16 compute, what must be float32 is (design 5): gate, value, read-out, norms, RoPE, softmax and loss."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddl_jax.config import GateConfig, ResidualConfig, ValueConfig
from ddl_jax.residual.gate import Gate
from ddl_jax.residual.value import Value
from ddl_jax.training.loss import CHUNK, cross_entropy
from ddl_jax.transformer.attention import rope_angles, rotate
from ddl_jax.transformer.norm import RMSNorm

# The oracle gets the rounded input, so that its rounding costs nothing. Arithmetic in bfloat16 would show as errors
# of about 2⁻⁹ = 2e-3; float32 sums of these lengths stay below 1e-5.
RELATIVE = 1e-5


def close(got, expected):
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert np.linalg.norm(got - expected) <= RELATIVE * np.linalg.norm(expected)


@pytest.fixture
def context():
    return jax.random.normal(jax.random.key(0), (2, 9, 96)).astype(jnp.bfloat16)


def exact(array):
    return np.asarray(array.astype(jnp.float32), np.float64)


def test_the_gate(context):
    gate = Gate(GateConfig(hidden=0, initial=0.7), 96, nnx.Rngs(0))
    logit = exact(context) @ exact(gate.output[...]) + float(gate.bias[...])
    close(gate(context), 2 / (1 + np.exp(-logit)))


@pytest.mark.parametrize("source", ["context", "read", "branch"])
def test_the_value(context, source):
    config = ResidualConfig(value=ValueConfig(source=source)).resolve(96).value
    value = Value(config, 96, 4, nnx.Rngs(0))
    close(value(context, context, context), exact(context) @ exact(value.weight[...]).T)


def test_rope(context):
    x = context.reshape(2, 9, 4, 24)
    angles = rope_angles(jnp.arange(9), 24)
    cos, sin = np.cos(exact(angles))[:, None], np.sin(exact(angles))[:, None]
    first, second = exact(x)[..., :12], exact(x)[..., 12:]
    close(rotate(x, angles), np.concatenate([first * cos - second * sin, second * cos + first * sin], -1))


def test_the_norm_rounds_its_result_only(context):
    norm = RMSNorm(96, jnp.dtype("float32"))
    x = exact(context)
    close(norm(context), x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-5))
    assert RMSNorm(96, jnp.dtype("bfloat16"))(context).dtype == jnp.bfloat16


def test_the_loss_adds_its_chunks_in_float32():
    """Many chunks: bfloat16 sums of the head's gradient would lose the small contributions of the later ones."""
    tokens = 16 * CHUNK
    features = (1 + 0.1 * jax.random.normal(jax.random.key(1), (tokens, 4))).astype(jnp.bfloat16)
    weight = (0.1 * jax.random.normal(jax.random.key(2), (5, 4))).astype(jnp.bfloat16)
    targets = jax.random.randint(jax.random.key(3), (tokens,), 0, 5)
    nats, (_, d_weight) = jax.value_and_grad(cross_entropy, (0, 1))(features, weight, targets)
    logits = exact(features) @ exact(weight).T
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    close(nats, -np.log(probabilities[np.arange(tokens), targets]).sum())
    error = probabilities - np.eye(5)[targets]
    # The error is rounded to bfloat16 before the product and the result once after it, each by 2⁻⁹ at most.
    np.testing.assert_allclose(exact(d_weight), error.T @ exact(features), atol=2**-7 * np.abs(error).sum() / 50)
