"""The official model: against its equations in float64 NumPy (always) and golden files (where they are)."""

import json
import os
import pathlib

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddl_jax.inference.decode import decoder, prefill, step
from ddl_jax.interop import from_official, to_official
from ddl_jax.interop.options import configuration, read_options
from ddl_jax.parameters import at
from ddl_jax.training.step import Batch, total_nats
from ddl_jax.transformer import Transformer
from tests import official
from tests.quick import QUICK

# float32 against float64: rounding at 6e-8 a step, a few hundred of them deep, of the size of the largest entry.
TOLERANCE = 1e-5

GOLDENS = os.environ.get("DDL_GOLDENS")
needs_goldens = pytest.mark.skipif(
    GOLDENS is None, reason="set DDL_GOLDENS to the folder of the official models' golden .npz files"
)
golden = pytest.mark.parametrize("name", ["cc_ec", "tc", "vdim1"])


def assert_close(actual, expected, tolerance=TOLERANCE):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.max(np.abs(expected)))


def read(name):
    """The file, its official options, and the tensors under a prefix."""
    file = np.load(pathlib.Path(GOLDENS) / f"{name}.npz")
    return file, json.loads(str(file["config"]))["config"], tensors_of(file, "param/")


def tensors_of(file, prefix):
    return {key.removeprefix(prefix): file[key] for key in file.files if key.startswith(prefix)}


def difference(actual, expected):
    """‖a − b‖ / ‖b‖."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@needs_goldens
@golden
def test_the_oracle_equals_the_golden_numbers(name):
    file, options, tensors = read(name)
    logits, seen = official.forward(tensors, file["input_ids"], name, options)
    assert_close(logits, file["logits64"], 1e-12)
    for key in [key for key in file.files if key.startswith(("upd/", "out/"))]:
        recorded = file[key][..., None] if key.endswith(("/x", "/x_out")) and name == "vdim1" else file[key]
        assert_close(seen[key], recorded)


@needs_goldens
@golden
@pytest.mark.parametrize("bits", [32, 64])
def test_logits_loss_and_gradients_equal_the_golden_numbers(name, bits):
    file, options, tensors = read(name)
    count = np.sum(file["targets"] != -1)
    with jax.enable_x64(bits == 64):
        model = from_official(options, tensors, name)
        graph, parameters = nnx.split(model)
        batch = Batch(*(jnp.asarray(file[key], jnp.int32) for key in ("input_ids", "targets")))

        def loss(parameters):
            model = nnx.merge(graph, parameters)
            return total_nats(model, batch) / count, model(batch.tokens)

        function = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)
        (value, logits), gradient = function(parameters)
        _, gradients, _ = to_official(nnx.merge(graph, gradient))
    assert logits.dtype == value.dtype == f"float{bits}"
    # Seen: 8e-7, 2e-6 and (a bias whose gradient nearly cancels) 4e-5 in float32; 8e-14 at most in float64.
    whole, single = {32: (1e-5, 1e-4), 64: (1e-9, 1e-9)}[bits]
    assert difference(logits, file["logits64"]) < whole
    assert difference(value, file["loss64"]) < min(whole, 1e-6)
    expected = tensors_of(file, "grad64/")
    assert set(expected) == set(gradients) - {"lm_head.weight"}
    joined = [np.concatenate([each[key].ravel() for key in expected]) for each in (gradients, expected)]
    assert difference(*joined) < whole
    for key in expected:
        assert difference(gradients[key], expected[key]) < single, key


@needs_goldens
@golden
@pytest.mark.parametrize("bits", [32, 64])
def test_cached_decoding_equals_the_golden_numbers(name, bits):
    """From one token on, each by its own step: what the official cache gives, and the full forward pass in float64."""
    file, options, tensors = read(name)
    tokens = jnp.asarray(file["input_ids"], jnp.int32)
    with jax.enable_x64(bits == 64):
        model = from_official(options, tensors, name)
        logits, past = prefill(model, tokens[:, :1], None, slots=tokens.shape[1])
        found, laid_out = [logits], decoder(model)
        one = jax.jit(step).lower(laid_out, tokens[:, 0], past).compile(QUICK)
        for column in range(1, tokens.shape[1]):
            logits, past = one(laid_out, tokens[:, column], past)
            found.append(logits)
        found = np.stack(found, axis=1)
    assert found.dtype == f"float{bits}"
    assert difference(found, file["decode_logits"]) < 1e-5
    assert difference(found, file["logits64"]) < {32: 1e-5, 64: 1e-9}[bits]


@needs_goldens
@golden
def test_each_module_equals_the_golden_numbers(name):
    """Each part alone, from the official code's own inputs to it: readers, norms, sublayers, gate, value, rewrite."""
    file, options, tensors = read(name)
    model = from_official(options, tensors, name)
    stream = model.stream

    def state_of(key):
        recorded = file[key][..., None] if name == "vdim1" else file[key]
        return np.swapaxes(recorded, -1, -2)

    @jax.jit
    def parts(stream, state, branch, context, x, i):
        update = at(stream.updates, i)
        return update.gate(context), update.value(branch, context, x), stream.write(state, branch, context, x, i)

    updates = 2 * options["num_hidden_layers"]
    embedding = model.embedding[...][file["input_ids"]]
    assert_close(stream.expand(embedding), state_of("upd/0/x"))
    for i in range(updates):
        state, branch, context = state_of(f"upd/{i}/x"), file[f"upd/{i}/k_in"], file[f"upd/{i}/context"]
        x = file[f"upd/{i}/v_in"] if f"upd/{i}/v_in" in file.files else file[f"upd/{i}/x"]
        assert_close(stream.read(state, i), x)
        block = at(model.blocks, i // 2)
        norm, sublayer = block.sublayers()[i % 2]
        assert_close(norm(x), context)
        assert_close(sublayer(context), branch)
        gate, value, after = parts(stream, state, branch, context, x, i)
        assert_close(gate, 2 * official.sigmoid(file[f"upd/{i}/beta_logit"][..., 0]))
        assert_close(value, 4 * official.sigmoid(file[f"upd/{i}/v_logit"]))
        assert_close(after, state_of(f"upd/{i + 1}/x" if i + 1 < updates else f"upd/{i}/x_out"))
    assert_close(stream.reduce(state_of(f"upd/{updates - 1}/x_out")), file["out/readout"])
    assert_close(model.final_norm(file["out/readout"]), file["out/final"])


# Parameters of the official models (vocabulary 50304, tied table counted once), as counted in the official code.
COUNTS = {
    ("baseline", 0): (123_590_400, 353_508_352),
    ("vdim1", 0): (123_627_312, 353_606_752),
    ("tc", 0): (123_842_476, 354_164_052),
    ("tc_ec", 0): (123_854_764, 354_180_436),
    ("cc", 0): (123_722_668, 353_856_852),
    ("cc_ec", 0): (123_734_956, 353_873_236),
    ("vdim1", 128): (125_971_248, 359_855_200),
    ("cc_ec", 128): (126_078_892, 360_121_684),
}
SIZES = {
    "small": {},  # the official defaults
    "medium": {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 8},
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant, gate_hidden", COUNTS)
def test_parameter_counts_of_the_official_models(variant, gate_hidden, size):
    gate = {"ddl_beta_single_linear": False, "ddl_beta_hidden_size": gate_hidden} if gate_hidden else {}
    config = configuration(read_options(SIZES[size] | gate, variant), variant)
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))  # shapes only: nothing is allocated
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert count == COUNTS[variant, gate_hidden][list(SIZES).index(size)]
