"""`DeltaStream` inside models that are not ours: a Python loop in NNX, and Linen through Flax's bridge."""

from flax import linen, nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ddl_jax import DeltaStream, ResidualConfig

WIDTH, LAYERS = 8, 3
CONFIGS = [ResidualConfig(), ResidualConfig(value_channels=2, reader="token"), ResidualConfig(kind="additive")]
every_config = pytest.mark.parametrize("config", CONFIGS, ids=["channel", "token", "additive"])


class NnxModel(nnx.Module):
    def __init__(self, config, rngs):
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(LAYERS)])
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)])
        self.stream = DeltaStream(config, width=WIDTH, sublayers=LAYERS, rngs=rngs)

    def __call__(self, embedding):
        state = self.stream.expand(embedding)
        for i, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            x = self.stream.read(state, i)
            context = norm(x)
            state = self.stream.write(state, jax.nn.silu(layer(context)), context, x, i)
        return self.stream.reduce(state)


class LinenModel(linen.Module):
    config: ResidualConfig

    @linen.compact
    def __call__(self, embedding):
        stream = nnx.bridge.to_linen(DeltaStream, self.config, width=WIDTH, sublayers=LAYERS, name="stream")
        state = stream.expand(embedding)
        for i in range(LAYERS):
            x = stream.read(state, i)
            context = linen.RMSNorm()(x)
            state = stream.write(state, jax.nn.silu(linen.Dense(WIDTH)(context)), context, x, i)
        return stream.reduce(state)


def task():
    embedding = np.random.default_rng(0).standard_normal((4, 6, WIDTH)).astype(np.float32)
    return embedding, np.roll(embedding, 1, axis=-1)


def train(loss, parameters, steps=60):
    """Adam on any tree; also the first gradient."""
    optimizer = optax.adam(1e-2)

    @jax.jit
    def run(parameters):
        def step(carry, _):
            parameters, state = carry
            value, gradient = jax.value_and_grad(loss)(parameters)
            updates, state = optimizer.update(gradient, state)
            return (optax.apply_updates(parameters, updates), state), value

        return jax.lax.scan(step, (parameters, optimizer.init(parameters)), None, length=steps)[1], jax.grad(loss)(
            parameters
        )

    return run(parameters)


@every_config
def test_an_nnx_model_with_a_python_loop(config):
    embedding, target = task()
    graph, parameters = nnx.split(NnxModel(config, nnx.Rngs(0)))
    losses, gradient = train(lambda p: jnp.mean((nnx.merge(graph, p)(embedding) - target) ** 2), parameters)
    assert losses[-1] < 0.8 * losses[0]
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradient))


@every_config
def test_a_linen_model_through_the_bridge(config):
    embedding, target = task()
    model = LinenModel(config)
    variables = model.init(jax.random.key(0), embedding)
    losses, gradient = train(lambda v: jnp.mean((model.apply(v, embedding) - target) ** 2), variables)
    assert losses[-1] < 0.8 * losses[0]
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradient))
    assert set(gradient) == {"params"}  # the stream's parameters lie beside Linen's own: one optimiser sees them all
    if config.kind == "delta":
        assert set(gradient["params"]["stream"]) == {"expansion", "readers", "updates"}
