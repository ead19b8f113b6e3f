"""The update puts direction, value and gate together by the paper's equation; write-only does not erase."""

from flax import nnx
import jax
import numpy as np
import pytest

from ddl_jax.config import ResidualConfig
from ddl_jax.parameters import at
from ddl_jax.residual import DeltaStream


@pytest.mark.parametrize("epsilon", [1e-5, 0.9])
@pytest.mark.parametrize("kind, erase", [("delta", 1.0), ("write_only", 0.0)])
def test_write_is_the_equation_of_its_kind(kind, erase, epsilon):
    config = ResidualConfig(kind=kind, epsilon=epsilon)
    stream = DeltaStream(config, width=8, sublayers=2, rngs=nnx.Rngs(0))
    state = jax.random.normal(jax.random.key(0), (2, 5, 4, 8))
    branch, context, x = jax.random.normal(jax.random.key(1), (3, 2, 5, 8))
    update = at(stream.updates, 1)
    v, β = (np.asarray(a, np.float64) for a in (update.value(branch, context, x), update.gate(context)))
    X, h = np.asarray(state, np.float64), np.asarray(branch, np.float64)
    k = h / np.sqrt(np.sum(h * h, axis=-1, keepdims=True) + epsilon**2)
    w = v - erase * np.einsum("btd,btjd->btj", k, X)
    expected = X + np.einsum("bt,btj,btd->btjd", β, w, k)
    np.testing.assert_allclose(stream.write(state, branch, context, x, 1), expected, atol=1e-5)  # float32, entries of 1
