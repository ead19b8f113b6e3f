"""What every kind of residual stream must do, whatever it computes.

The model around the stream is as small as one can be: its sublayers see one token at a time, so that whatever passes
between tokens passes through the stream.
"""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddl_jax.cache import Cache, first, following
from ddl_jax.config.residual import HYPER
from ddl_jax.parameters import at
from ddl_jax.residual import DeltaStream
from tests.quick import QUICK
from tests.residual.streams import STREAMS, mixes_tokens

BATCH, TOKENS, WIDTH, SUBLAYERS = 2, 6, 8, 4
PADDING = (0, 2)  # columns before each sequence, where they are padded
STEP = 0.002  # of the finite differences, along directions of length about 1

every_stream = pytest.mark.parametrize("name", STREAMS)


def normalised(x):
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def matrices():
    return np.random.default_rng(0).standard_normal((SUBLAYERS, WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5


def make_stream(name, dtype=jnp.float32):
    """The stream with generic parameters, not those it starts with: a start hides what it multiplies by 0."""

    def make():
        return DeltaStream(STREAMS[name], width=WIDTH, sublayers=SUBLAYERS, rngs=nnx.Rngs(0), dtype=dtype)

    graph, parameters = nnx.split(nnx.eval_shape(make))
    rng = np.random.default_rng(1)

    # Through the sigmoids and normalised sums of mHC less comes of what is drawn.
    mean, spread = (0.0, 1.0) if STREAMS[name].kind == "mhc" else (0.3, 0.3)

    def draw(leaf):
        return jnp.asarray(mean + spread * rng.standard_normal(leaf.shape), jnp.float32)

    return nnx.merge(graph, jax.tree.map(draw, parameters))


def unrolled(stream, embedding, cache=None):
    """The interface as written in `stream.py`'s first lines: the output, and what was seen on the way."""
    state = stream.expand(embedding, cache)
    seen = []
    for i, matrix in enumerate(matrices()):
        x = stream.read(state, i, cache)
        context = normalised(x)
        branch = jnp.tanh(context @ matrix)
        seen.append((state, branch, context, x))
        state = stream.write(state, branch, context, x, i, cache)
    return stream.reduce(state, cache), (state, seen)


def scanned(stream, embedding):
    """The same by a scan over `stream.connections()`."""

    def layer(carry, parameters):
        (state, x), (connection, matrix) = carry, parameters
        context = normalised(x)
        return connection.write_then_read(state, jnp.tanh(context @ matrix), context, x), None

    state = stream.expand(embedding)
    carry = (state, stream.read(state, 0))
    return jax.lax.scan(layer, carry, (stream.connections(), matrices()))[0][1]


def decoded(stream, embedding, columns, padding):
    """The output of the first columns, then of one column after the other. Padding's outputs are some number."""
    embedding = jnp.where(jnp.arange(TOKENS)[:, None] >= padding[:, None, None], embedding, 0)
    kept = {}
    start = first(columns, TOKENS, TOKENS, padding if any(padding) else None)
    output, _ = unrolled(stream, embedding[:, :columns], Cache(start, kept))

    def step(kept, column):
        one = jax.lax.dynamic_slice_in_dim(embedding, column, 1, axis=1)
        output, _ = unrolled(stream, one, Cache(following(column, TOKENS, padding), kept))
        return kept, output[:, 0]

    _, outputs = jax.lax.scan(step, kept, jnp.arange(columns, TOKENS))
    return jnp.concatenate([output, outputs.swapaxes(0, 1)], axis=1)


@functools.cache
def observed(name):
    """Everything the tests below look at, for one stream, from one compiled function."""
    graph, parameters = nnx.split(make_stream(name))

    def run(parameters, embedding):
        return scanned(nnx.merge(graph, parameters), embedding)

    def everything(parameters, embedding, cotangent, randoms):
        stream = nnx.merge(graph, parameters)
        output, (state, seen) = unrolled(stream, embedding)
        seen = jax.tree.map(lambda *layers: jnp.stack(layers), *seen)
        separate = [jnp.append(a[1:], last[None], axis=0) for a, last in ((seen[0], state), (seen[3], output))]
        fused = jax.vmap(lambda connection, *seen: connection.write_then_read(*seen))(stream.connections(), *seen)
        diagnostics = jax.vmap(lambda i, *seen: stream.diagnostics(*seen, i))(jnp.arange(SUBLAYERS), *seen)

        # For each token t of the first sequence, the gradient of a projection of its output by all embeddings.
        base, vjp = jax.vjp(run, parameters, embedding)
        at_token = jnp.eye(TOKENS)[:, None, :, None] * jnp.array([1.0, 0.0])[:, None, None] * cotangent
        reach = jax.vmap(lambda c: vjp(c)[1])(at_token)
        gradient, _ = vjp(cotangent)

        # Outputs with one parameter at a time moved, both along its gradient and along a random direction.
        leaves, tree = jax.tree.flatten(parameters)
        coefficients = np.kron(np.eye(len(leaves)), STEP * np.array([-2, -1, 1, 2])[:, None])
        slopes, moved = [], []
        for which, (leaf, g, random) in enumerate(zip(leaves, jax.tree.leaves(gradient), randoms, strict=True)):
            direction = g / jnp.linalg.norm(g) + random / jnp.linalg.norm(random)
            slopes.append((jnp.sum(direction * g), jnp.linalg.norm(g) * jnp.linalg.norm(direction)))
            moved.append(leaf + jnp.multiply.outer(coefficients[:, which], direction))
        outputs = jax.vmap(run, in_axes=(0, None))(jax.tree.unflatten(tree, moved), embedding) if moved else base
        later = jnp.roll(embedding, jnp.array(PADDING)[1], axis=1)  # the first sequence is not looked at
        in_turn = (decoded(stream, embedding, 1, np.array([0, 0])), decoded(stream, later, 4, np.array(PADDING)))
        return {"unrolled": output, "scanned": base, "decoded": in_turn,
                "separate": separate, "fused": fused, "diagnostics": diagnostics,
                "gradient": gradient, "reach": reach, "slopes": slopes,
                "moved": outputs.reshape(-1, 4, *base.shape) if moved else ()}  # fmt: skip

    rng = np.random.default_rng(2)
    embedding, cotangent = rng.standard_normal((2, BATCH, TOKENS, WIDTH)).astype(np.float32)
    randoms = [rng.standard_normal(leaf.shape).astype(np.float32) for leaf in jax.tree.leaves(parameters)]
    result = jax.jit(everything, compiler_options=QUICK)(parameters, embedding, cotangent, randoms)
    paths = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(parameters)]
    return jax.device_get(result) | {"paths": paths, "cotangent": cotangent.astype(np.float64)}


@every_stream
def test_no_output_depends_on_a_later_token_or_another_sequence(name):
    reach = np.max(np.abs(observed(name)["reach"]), axis=-1)  # (output token, sequence, embedding token)
    assert not reach[:, 1].any()
    for t, row in enumerate(reach[:, 0]):
        assert not row[t + 1 :].any()
        assert row[t] > 0
        if mixes_tokens(STREAMS[name].resolve(WIDTH)):
            assert t == 0 or row[t - 1] > 0
        else:
            assert not row[:t].any()


@every_stream
def test_every_parameter_has_a_gradient_in_every_entry(name):
    found = observed(name)
    for path, gradient in zip(found["paths"], jax.tree.leaves(found["gradient"]), strict=True):
        if STREAMS[name].kind == "mhc" and "mixing" in path:
            # The last M_res comes before the sum over streams, and its columns sum to 1. The first mixes copies, and
            # its rows sum to 1 as closely as Sinkhorn's rounds bring them.
            assert np.max(np.abs(gradient[-1])) < 1e-5 * np.linalg.norm(gradient)
            gradient = gradient[1:-1]
        # Generic inputs: an exact zero, a NaN or a rounding-sized number is an entry that takes no part.
        assert np.all(np.abs(gradient) > 1e-9), f"{path} has dead entries"
        assert np.linalg.norm(gradient) > 1e-3, path


@every_stream
def test_gradients_equal_finite_differences(name):
    found = observed(name)
    for which, path in enumerate(found["paths"]):
        far_below, below, above, far_above = (
            np.sum(found["cotangent"] * output.astype(np.float64)) for output in found["moved"][which]
        )
        difference = (8 * (above - below) - (far_above - far_below)) / (12 * STEP)
        slope, size = found["slopes"][which]
        # Fourth order in the step: 0.002⁴ ≈ 2e-11 of the fifth derivative, large where a norm divides by little.
        # The outputs' rounding, 1e-7 of their size over the step, is 6e-5 for each of 96 random summands.
        assert abs(difference - slope) <= 1e-3 * size + 6e-4, f"{path}: {difference} against {slope}"


@every_stream
def test_every_parameter_changes_the_output(name):
    found = observed(name)
    for which, path in enumerate(found["paths"]):
        change = np.linalg.norm(found["moved"][which, 3] - found["scanned"])
        assert change > 1e-4 * np.linalg.norm(found["scanned"]), f"{path} has no effect"


@every_stream
def test_scanned_equals_unrolled(name):
    found = observed(name)
    # The same operations in float32 in another order, four sublayers deep.
    np.testing.assert_allclose(found["scanned"], found["unrolled"], atol=2e-6 * np.max(np.abs(found["unrolled"])))


@every_stream
def test_decoded_equals_full(name):
    """Every position through a cache: token by token, shorter than the convolutions; and behind padding."""
    found = observed(name)
    full, atol = found["unrolled"], 2e-6 * np.max(np.abs(found["unrolled"]))
    one_by_one, padded = found["decoded"]
    np.testing.assert_allclose(one_by_one, full, atol=atol)
    np.testing.assert_allclose(padded[1, PADDING[1] :], full[1, : TOKENS - PADDING[1]], atol=atol)


@every_stream
def test_write_then_read_equals_write_and_then_read(name):
    for separate, fused in zip(observed(name)["separate"], observed(name)["fused"], strict=True):
        np.testing.assert_allclose(fused, separate, atol=1e-6 * np.max(np.abs(separate)))


@every_stream
def test_diagnostics_say_what_the_write_does(name):
    config = STREAMS[name].resolve(WIDTH)
    found = observed(name)["diagnostics"]
    if config.kind in ("additive", "additive_expanded"):
        assert found == {}
        return
    if config.kind in HYPER:
        assert set(found) == {"mixing_distance"}
        assert found["mixing_distance"].shape == (SUBLAYERS, BATCH, TOKENS)
        assert np.all(found["mixing_distance"] > 1e-2)  # generic parameters mix
        return
    assert set(found) == {"gate", "rho", "discrepancy_before", "discrepancy_after"}
    assert all(values.shape == (SUBLAYERS, BATCH, TOKENS) for values in found.values())
    assert np.all((found["gate"] > 0) & (found["gate"] < 2))
    assert np.std(found["gate"]) > 1e-3
    np.testing.assert_allclose(found["rho"], 1.0, rtol=1e-4)  # ρ = ‖h‖² / (‖h‖² + ε²), and h is far above ε here
    if config.kind == "delta":
        contracted = np.abs(1 - found["gate"] * found["rho"]) * found["discrepancy_before"]
        scale = np.max(found["discrepancy_before"])
        np.testing.assert_allclose(found["discrepancy_after"], contracted, atol=1e-5 * scale)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@every_stream
def test_the_state_keeps_its_dtype_and_shape_at_every_layer(name, dtype):
    dtype = jnp.dtype(dtype)
    stream = make_stream(name, dtype)
    channels = stream.config.value_channels
    embedding = jax.ShapeDtypeStruct((BATCH, TOKENS, WIDTH), jnp.float32)
    output, (last, seen) = jax.eval_shape(functools.partial(unrolled, stream), embedding)
    assert (last.shape, last.dtype) == ((BATCH, TOKENS, channels, WIDTH), dtype)
    fused = at(stream.connections(), 0).write_then_read
    after_first = jax.eval_shape(lambda *seen: fused(*seen), *seen[0])
    for state, x in [(state, x) for state, _, _, x in seen] + [after_first]:
        assert (state.shape, state.dtype) == ((BATCH, TOKENS, channels, WIDTH), dtype)
        assert (x.shape, x.dtype) == ((BATCH, TOKENS, WIDTH), dtype)
    for result in (output, jax.eval_shape(functools.partial(scanned, stream), embedding)):
        assert (result.shape, result.dtype) == ((BATCH, TOKENS, WIDTH), dtype)


@pytest.mark.parametrize("name", ["delta", "delta V4 token", "official", "write_only", "additive_expanded", "mhc"])
def test_a_bfloat16_state_costs_its_rounding_and_no_more(name):
    """Every read, edit and pool is computed in float32: only the stored state and reads are rounded."""
    embedding = jax.random.normal(jax.random.key(2), (BATCH, TOKENS, WIDTH))
    wide, narrow = (np.asarray(jax.jit(scanned)(make_stream(name, dtype), embedding), np.float64)
                    for dtype in (jnp.float32, jnp.bfloat16))  # fmt: skip
    # Four writes and five reads, each rounding by 2⁻⁹ of its size on average; errors feed through the sublayers.
    assert np.linalg.norm(narrow - wide) < 9 * 2**-8 * np.linalg.norm(wide)
    assert np.linalg.norm(narrow - wide) > 0
