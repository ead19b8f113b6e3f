"""How large first updates are: against the same numbers worked out step by step, for kinds with and without a gate."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddl_jax.config import GateConfig, ResidualConfig, TransformerConfig
from ddl_jax.studies.initial import first_updates
from ddl_jax.training.step import Batch
from ddl_jax.transformer import Transformer
from tests.quick import quick_compilation


@pytest.fixture(scope="module", autouse=True)
def quick():
    with quick_compilation():
        yield


def model_of(**residual) -> tuple[Transformer, Batch]:
    config = TransformerConfig(
        layers=1, width=8, heads=2, context_length=6, vocab_size=64, residual=ResidualConfig(**residual)
    )
    tokens = jax.random.randint(jax.random.key(0), (3, 6), 0, 64)
    return Transformer(config, rngs=nnx.Rngs(0)), Batch(tokens, jnp.roll(tokens, -1, axis=1).at[:, -1].set(-1))


def test_a_plain_model():
    model, batch = model_of(kind="additive")
    found = first_updates(model, batch)
    x = np.asarray(model.embedding[...][batch.tokens], np.float64)
    for i, sublayer in enumerate(found["sublayers"]):
        block = jax.tree.map(lambda p, i=i: p[i // 2], model.blocks)
        norm, branch = block.sublayers()[i % 2]
        h = np.asarray(branch(norm(jnp.asarray(x, jnp.float32))), np.float64)
        ratios = np.linalg.norm(h, axis=-1) / np.linalg.norm(x, axis=-1)
        assert sublayer["gate"] is None
        # An attention's first update is an order larger than the state, whose rounding then shows in float32.
        assert sublayer["relative_update"] == pytest.approx(np.sqrt(np.mean(ratios**2)), rel=1e-4)
        x = x + h
    log_p = jax.nn.log_softmax(model(batch.tokens))
    picked = jnp.take_along_axis(log_p, batch.targets[..., None].clip(0), axis=-1)[..., 0]
    assert found["loss"] == pytest.approx(-float(picked[:, :-1].mean()), rel=1e-5)  # the last is not counted


def test_the_gate_starts_near_what_was_asked_for():
    initial = 0.2
    found = first_updates(*model_of(gate=GateConfig(initial=initial)))
    assert len(found["sublayers"]) == 2
    assert all(sublayer["gate"] == pytest.approx(initial, abs=0.15) for sublayer in found["sublayers"])


def test_what_is_not_finite_is_none():
    model, batch = model_of(kind="additive")
    model.embedding[...] = model.embedding[...] * jnp.nan
    found = first_updates(model, batch)
    assert found["loss"] is None and found["sublayers"][0]["relative_update"] is None


def test_a_kind_that_mixes_channels_has_no_gate():
    found = first_updates(*model_of(kind="mhc", value_channels=2))
    assert all(sublayer["gate"] is None and sublayer["relative_update"] > 0 for sublayer in found["sublayers"])
