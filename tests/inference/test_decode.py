"""A model through its caches, against the same model over whole sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddl_jax.config import GateConfig, ResidualConfig
from ddl_jax.inference.decode import decoder, prefill, step
from ddl_jax.inference.skipping import skipping
from ddl_jax.plan.sizes import cache_bytes
from tests.inference.models import VOCABULARY, make_model
from tests.quick import QUICK

TOKENS = 12
LENGTHS = np.array([9, 1, 2])  # of the prompts: two are shorter than the convolutions
OFFICIAL = {"preset": "official_code"}
STREAMS = {
    "additive": ResidualConfig(kind="additive"),
    "write_only V3": ResidualConfig(kind="write_only", value_channels=3),
    "scalar with a two-layer gate": ResidualConfig(value_channels=1, gate=GateConfig(hidden=4)),
    "CC": ResidualConfig(),
    "TC": ResidualConfig(reader="token"),
    "official CC": ResidualConfig(**OFFICIAL),
    "official TC without EC": ResidualConfig(reader="token", expansion="repeat", **OFFICIAL),
    "attention": ResidualConfig(value_channels=2, direction="attention", direction_width=3),
    "hyper_connections": ResidualConfig(kind="hyper_connections", value_channels=2),
    "mhc": ResidualConfig(kind="mhc", value_channels=3),
    "official mlp": ResidualConfig(value_channels=2, direction="mlp", **OFFICIAL),
}
every_stream = pytest.mark.parametrize("name", STREAMS)


def some_tokens(batch=3, tokens=TOKENS):
    return np.random.default_rng(1).integers(0, VOCABULARY, (batch, tokens), np.int32)


def full_logits(model, tokens):
    return np.asarray(jax.jit(lambda model, tokens: model(tokens), compiler_options=QUICK)(model, tokens))


def decoded(model, tokens, lengths, slots, steps):
    """Logits after each row's prompt, the first `lengths` of its tokens, and after each of `steps` more of them."""
    columns = max(lengths)
    prompts = np.full((len(tokens), columns), VOCABULARY - 1, np.int32)
    for prompt, row, length in zip(prompts, tokens, lengths, strict=True):
        prompt[columns - length :] = row[:length]
    padding = None if min(lengths) == columns else jnp.asarray(columns - lengths)
    whole = prefill.lower(model, prompts, padding, slots=slots).compile(QUICK)
    logits, past = whole(model, prompts, padding)
    found, laid_out = [logits], decoder.lower(model).compile(QUICK)(model)
    rows = np.arange(len(tokens))
    one = jax.jit(step).lower(laid_out, tokens[:, 0], past).compile(QUICK)  # one program for all of them
    for n in range(steps):
        logits, past = one(laid_out, tokens[rows, lengths + n], past)
        found.append(logits)
    return np.stack(found, axis=1)


def assert_equal(found, full):
    # float32 in another order, two layers deep; logits of size 10 to 100.
    np.testing.assert_allclose(found, full, atol=1e-5 * np.max(np.abs(full)))


@every_stream
def test_rows_of_any_length_equal_the_full_forward_pass(name):
    """Left-padded prompts of 9, 1 and 2 tokens, then three more tokens each: the rows alone, whole and unpadded."""
    model, tokens = make_model(STREAMS[name]), some_tokens()
    full = full_logits(model, tokens)
    found = decoded(model, tokens, LENGTHS, slots=TOKENS, steps=3)
    for row, length in enumerate(LENGTHS):
        assert_equal(found[row], full[row, length - 1 : length + 3])


@pytest.mark.parametrize("lengths", [[1, 1], [5, 9], [17, 17]])
@pytest.mark.parametrize("name", ["TC", "attention"])
def test_past_the_context_each_token_sees_as_many_before(name, lengths, monkeypatch):
    """Keys and values of `context_length` tokens: as one full forward pass with a banded mask of that length."""
    window, length, lengths = 6, 20, np.array(lengths)
    model, tokens = make_model(STREAMS[name], context_length=window), some_tokens(2, length)
    with monkeypatch.context() as patch:
        banded = functools.partial(jax.nn.dot_product_attention, local_window_size=(window - 1, 0))
        patch.setattr(jax.nn, "dot_product_attention", banded)
        full = np.asarray(full_logits(make_model(STREAMS[name], context_length=length), tokens))
    steps = length - max(lengths)
    found = decoded(model, tokens, lengths, slots=100, steps=steps)
    for row, first in enumerate(lengths):
        assert_equal(found[row], full[row, first - 1 : first + steps])


def test_fewer_slots_do_while_there_are_fewer_tokens():
    model, tokens = make_model(STREAMS["CC"]), some_tokens()
    few, many = (decoded(model, tokens, LENGTHS, slots=slots, steps=1) for slots in (10, TOKENS))
    assert_equal(few, many)


@pytest.mark.parametrize("dtypes", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["additive", "TC", "official TC without EC", "attention"])
def test_the_cache_is_as_large_as_planned(name, dtypes):
    model = make_model(STREAMS[name], compute_dtype=dtypes, state_dtype=dtypes)
    tokens = jax.ShapeDtypeStruct((3, 5), jnp.int32)
    _, past = jax.eval_shape(functools.partial(prefill, slots=TOKENS), model, tokens, None)
    planned = cache_bytes(model.config, 3)
    kept = jax.tree.leaves_with_path((past.start, past.layers))
    found = {"keys_and_values": 0, "direction": 0, "readers": 0, "expansion": 0}
    for path, leaf in kept:
        names = path[-1].key.split("/")
        part = "expansion" if "expansion" in names else "readers" if names[-1] == "history" else "keys_and_values"
        found["direction" if "write" in names else part] += leaf.size * leaf.dtype.itemsize
    assert {part: size for part, size in found.items() if size} == planned


def test_steps_multiply_in_the_compute_dtype():
    """A bfloat16 model is laid out in bfloat16, but for what its products are float32 in: gates, readers, embedding."""
    laid_out = decoder(make_model(STREAMS["CC"], compute_dtype="bfloat16"))
    block, connections = laid_out.layers[1]
    assert block.attention.qkv.dtype == block.mlp.output.dtype == laid_out.head.dtype == jnp.bfloat16
    assert connections[0].update.gate.output.dtype == laid_out.embedding.dtype == jnp.float32


def test_heads_with_a_norm_and_a_gate():
    model, tokens = make_model(STREAMS["CC"], head_norm=True, output_gate=True, qk_norm=False), some_tokens()
    full = full_logits(model, tokens)
    for skips in (model, skipping(model, 1e-9)):  # no gate is below, but every sublayer is remembered and recalled
        found = decoded(skips, tokens, LENGTHS, slots=TOKENS, steps=3)
        for row, length in enumerate(LENGTHS):
            assert_equal(found[row], full[row, length - 1 : length + 3])


@pytest.mark.parametrize("name", ["CC", "TC", "attention"])
def test_skipping_gives_what_the_model_without_these_edits_gives(name):
    """Also where some rows of a batch need a sublayer and others do not; and keys are kept of what is skipped."""
    model, tokens = make_model(STREAMS[name]), some_tokens()
    skips, lengths, steps = skipping(model, 1.0), np.array([3, 1, 2]), 9
    full, found = full_logits(skips, tokens), decoded(skips, tokens, lengths, slots=TOKENS, steps=steps)
    for row, length in enumerate(lengths):
        assert_equal(found[row], full[row, length - 1 : length + steps])
    assert np.max(np.abs(full - full_logits(model, tokens))) > 0.1
    everything = full_logits(skipping(model, 2.0), tokens)
    assert np.max(np.abs(full - everything)) > 0.1  # some edits are left out, not all


def test_a_sublayer_that_no_row_needs_is_skipped():
    model, tokens = make_model(STREAMS["CC"]), some_tokens()
    for below, skipped in ((1e-9, 0), (2.0, 4)):  # of two layers, once
        skips = skipping(model, below)
        _, past = prefill(skips, tokens[:, :3], None, slots=TOKENS)
        _, past = jax.jit(step)(decoder(skips), tokens[:, 3], past)
        assert past.skipped == skipped
