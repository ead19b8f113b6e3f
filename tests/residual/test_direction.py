"""Directions that are not the sublayer's output, against their equations in float64 NumPy."""

import math

from flax import nnx
import jax
import numpy as np

from ddl_jax.config import ResidualConfig
from ddl_jax.residual.direction import DIRECTIONS

WIDTH = 8


def make(kind):
    config = ResidualConfig(value_channels=2, direction=kind, direction_width=3).resolve(WIDTH)
    module = DIRECTIONS[kind](config, WIDTH, nnx.Rngs(0))
    branch, context = jax.random.normal(jax.random.key(0), (2, 2, 5, WIDTH))
    return module, np.asarray(context, np.float64), module(branch, context)


def test_mlp():
    module, c, h = make("mlp")
    inner = c @ module.input[...]
    gelu = inner / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
    np.testing.assert_allclose(h, gelu @ module.output[...], atol=1e-6)


def test_attention_has_one_causal_head():
    module, c, h = make("attention")
    q, k, v = (c @ np.asarray(weight[...], np.float64) for weight in (module.query, module.key, module.value))
    expected = np.zeros((2, 5, 3))
    for t in range(5):
        scores = np.einsum("bd,bsd->bs", q[:, t], k[:, : t + 1]) / math.sqrt(3)
        weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
        expected[:, t] = np.einsum("bs,bsd->bd", weights, v[:, : t + 1])
    np.testing.assert_allclose(h, expected @ module.output[...], atol=1e-6)
