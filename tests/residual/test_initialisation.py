"""Where each part of the stream starts, in both presets: no general initialiser may overwrite a part's own."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddl_jax.config import GateConfig, ResidualConfig
from ddl_jax.residual import DeltaStream
from ddl_jax.residual.gate import Gate

WIDTH, SUBLAYERS = 64, 8
OFFICIAL = {"preset": "official_code"}


def make(width=WIDTH, **settings):
    return DeltaStream(ResidualConfig(**settings), width=width, sublayers=SUBLAYERS, rngs=nnx.Rngs(0))


def assert_normal(weight, std):
    """Mean 0 and the given deviation, each within five standard errors."""
    n = weight.size
    assert abs(np.mean(weight)) < 5 * std / n**0.5
    assert abs(np.std(weight) / std - 1) < 5 / (2 * n) ** 0.5


def embedding(width=WIDTH):
    return jnp.asarray(0.02 * np.random.default_rng(0).standard_normal((2, 5, width)), jnp.float32)


@pytest.mark.parametrize("reader", ["channel", "token"])
def test_paper_readers_start_as_the_mean_over_channels(reader):
    stream = make(reader=reader)
    state = jax.random.normal(jax.random.key(0), (2, 5, 4, WIDTH))
    for x in (stream.read(state, 0), stream.read(state, 5), stream.reduce(state)):
        np.testing.assert_allclose(x, np.mean(np.asarray(state, np.float64), axis=2), atol=1e-6)


@pytest.mark.parametrize("reader", ["channel", "token"])
def test_official_readers_start_with_random_signs_and_a_pool_that_is_the_mean(reader):
    readers = make(reader=reader, **OFFICIAL).readers
    assert_normal(readers.taps[...], 0.5 / WIDTH**0.5)
    np.testing.assert_array_equal(readers.pool[...], 1 / 4)


def test_the_convolution_form_can_start_as_the_mean_too():
    stream = make(reader_form="convolution")
    np.testing.assert_allclose(jax.vmap(lambda reader: reader.weights())(stream.readers), 1 / 4)


@pytest.mark.parametrize("settings", [{"reader_form": "convolution"}, OFFICIAL], ids=str)
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
def test_effective_weights_of_the_convolution_form(channels, settings):
    stream = make(width=3, value_channels=channels, reader="channel", **settings)
    reader = jax.tree.map(lambda p: jax.random.normal(jax.random.key(p.size), p.shape[1:]), stream.readers)
    taps, pool = np.asarray(reader.taps[...], np.float64), np.asarray(reader.pool[...], np.float64)
    expected = np.zeros((channels, 3))
    for j in range(channels):  # a[i, j] = Σ_u p_u taps[j − u + (K−1)//2, i], as the official code pads
        for u in range(channels):
            tap = j - u + (channels - 1) // 2
            if 0 <= tap < channels:
                expected[j] += pool[u] * taps[tap]
    np.testing.assert_allclose(reader.weights(), expected, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("settings", [{}, OFFICIAL], ids=str)
def test_every_channel_starts_as_the_embedding_with_and_without_ec(settings):
    e = embedding()
    for expansion in ("convolution", "repeat"):
        state = make(expansion=expansion, **settings).expand(e)
        np.testing.assert_array_equal(state, np.broadcast_to(e[:, :, None], (2, 5, 4, WIDTH)))


@pytest.mark.parametrize("initial", [0.01, 0.2, 0.5, 1.0, 1.5, 1.99])
@pytest.mark.parametrize("hidden", [0, 16])
def test_the_initial_gate_is_what_was_asked_for(initial, hidden):
    """A general initialiser that runs after the gate's own would leave it at 1, whatever was asked for."""
    stream = make(gate=GateConfig(initial=initial, hidden=hidden))
    gates = stream.updates.gate
    np.testing.assert_allclose(gates.bias[...], np.log(initial / (2 - initial)), atol=1e-6)
    at_zero = jax.vmap(lambda gate: gate(jnp.zeros((1, 1, WIDTH))))(gates)
    np.testing.assert_allclose(at_zero, initial, rtol=1e-5)  # float32 sigmoid


def test_the_gate_is_alive_at_both_ends_of_the_allowed_range():
    """A gate that starts on a clamped logit has a gradient of about 1e-6 and stays where it is."""
    context = jax.random.normal(jax.random.key(0), (1, 16, WIDTH))
    for initial in (0.01, 1.99):
        gate = Gate(GateConfig(hidden=0, initial=initial), WIDTH, nnx.Rngs(0))
        gradient = nnx.grad(lambda gate: jnp.mean(gate(context)))(gate)
        assert jnp.abs(gradient.bias[...]) > 5e-3  # β(2 − β)/2 = 0.00995 at both ends


@pytest.mark.parametrize("settings, bias", [({}, False), (OFFICIAL, True)], ids=str)
def test_deviations_of_gate_and_value(settings, bias):
    updates = make(gate=GateConfig(hidden=16), **settings).updates
    for weight in (updates.gate.hidden, updates.gate.output, updates.value.weight):
        assert_normal(weight[...], 0.5 / WIDTH**0.5)  # whatever the fan-in
    assert (updates.gate.hidden_bias is None) == bool(settings)  # b₁ is the paper's
    if not settings:
        np.testing.assert_array_equal(updates.gate.hidden_bias[...], 0)
    assert hasattr(updates.value, "bias") == bias
    if bias:
        values, bound = np.asarray(updates.value.bias[...]), WIDTH**-0.5
        assert np.max(np.abs(values)) <= bound
        assert np.std(values) == pytest.approx(bound / 3**0.5, rel=0.4)  # of a uniform; 32 draws


def test_every_layer_starts_differently():
    updates = make(gate=GateConfig(hidden=16), reader_initial="normal").updates
    for weight in jax.tree.leaves(nnx.state((updates.gate.hidden, updates.gate.output, updates.value.weight))):
        assert np.all(np.std(weight, axis=0) > 0)


def test_the_official_value_starts_around_two():
    e = embedding()
    stream = make(**OFFICIAL)
    x = stream.read(stream.expand(e), 0)
    values = stream.updates.value
    v = jax.vmap(lambda value: value(x, x, x))(values)
    np.testing.assert_allclose(v, 2.0, atol=0.2)  # 4σ(b), |b| ≤ 1/8


def test_the_official_reader_starts_so_small_that_the_norms_epsilon_shows():
    """The first norm of CC gives rms 0.17, not 1: eps and its place are part of the preset. At the width of `small`."""
    width = 768
    config = ResidualConfig(value_channels=4, expansion="repeat", **OFFICIAL)
    stream = DeltaStream(config, width=width, sublayers=2, rngs=nnx.Rngs(0))
    x = np.asarray(stream.read(stream.expand(embedding(width)), 0), np.float64)
    context = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5)
    assert np.sqrt(np.mean(context**2)) == pytest.approx(0.17, rel=0.2)  # one draw of 768 × 4 weights


def test_presets_resolve_to_their_row_of_the_table():
    stream = make(**OFFICIAL)
    assert jax.tree.leaves(stream.readers)[0].shape[0] == SUBLAYERS // 2 + 1
    assert jax.tree.leaves(make().readers)[0].shape[0] == SUBLAYERS + 1
    assert stream.readers_used == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert make().readers_used == list(range(9))


@pytest.mark.parametrize("reader", ["channel", "token"])
def test_additive_expanded_is_additive_at_the_start(reader):
    """All channels are equal and readers take their mean: the matched control starts as the plain Transformer."""
    e = embedding()
    plain, expanded = make(kind="additive"), make(kind="additive_expanded", reader=reader)
    states = [stream.expand(e) for stream in (plain, expanded)]
    for i in range(SUBLAYERS):
        reads = [stream.read(state, i) for stream, state in zip((plain, expanded), states, strict=True)]
        np.testing.assert_allclose(*reads, atol=1e-6)
        branch = jnp.sin(50 * reads[0])
        states = [
            stream.write(state, branch, x, x, i)
            for stream, state, x in zip((plain, expanded), states, reads, strict=True)
        ]
    np.testing.assert_allclose(plain.reduce(states[0]), expanded.reduce(states[1]), atol=1e-6)


def test_additive_adds():
    """x + update, not x · update."""
    stream = make(kind="additive")
    e = embedding()
    branch = jnp.ones_like(e)
    np.testing.assert_allclose(stream.reduce(stream.write(stream.expand(e), branch, e, e, 0)), e + 1, rtol=1e-6)
