"""The official model: against its equations in float64 NumPy (always) and golden files (where they are)."""

import json
import os
import pathlib

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddl_jax.parameters import at
from ddl_jax.training.step import Batch, total_nats
from ddl_jax.transformer import Transformer
from tests import official

TINY = {"layers": 2, "width": 12, "heads": 2, "head_dim": 8, "vocab_size": 19}
# float32 against float64: rounding at 6e-8 a step, a few hundred of them deep, of the size of the largest entry.
TOLERANCE = 1e-5

GOLDENS = os.environ.get("DDL_GOLDENS")
needs_goldens = pytest.mark.skipif(
    GOLDENS is None, reason="set DDL_GOLDENS to the folder of the official models' golden .npz files"
)
golden = pytest.mark.parametrize("name", ["cc_ec", "tc", "vdim1"])


def assert_close(actual, expected, tolerance=TOLERANCE):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.max(np.abs(expected)))


@pytest.mark.parametrize("variant, gate_hidden", [(v, 0) for v in official.VARIANTS] + [("vdim1", 5), ("cc_ec", 5)])
def test_the_transformer_computes_the_official_equations(variant, gate_hidden):
    tensors = official.random_tensors(variant=variant, gate_hidden=gate_hidden, **TINY)
    model = official.transformer(tensors, variant, gate_hidden=gate_hidden, **TINY)
    tokens = np.random.default_rng(0).integers(0, TINY["vocab_size"], (2, 7))
    expected, _ = official.forward(tensors, tokens, TINY["head_dim"], TINY["layers"])
    logits = jax.jit(lambda model, tokens: model(tokens))(model, tokens)
    assert logits.dtype == jnp.float32
    assert_close(logits, expected, 3e-5)  # through generic weights, whose norms are above 1, errors grow


def read(name):
    file = np.load(pathlib.Path(GOLDENS) / f"{name}.npz")
    config = json.loads(str(file["config"]))["resolved"]
    sizes = {"layers": config["num_hidden_layers"], "width": config["hidden_size"], "vocab_size": config["vocab_size"],
             "heads": config["num_attention_heads"], "head_dim": config["head_dim"]}  # fmt: skip
    tensors = {key.removeprefix("param/"): file[key] for key in file.files if key.startswith("param/")}
    return file, tensors, sizes


@needs_goldens
@golden
def test_the_oracle_equals_the_golden_numbers(name):
    file, tensors, sizes = read(name)
    logits, seen = official.forward(tensors, file["input_ids"], sizes["head_dim"], sizes["layers"])
    assert_close(logits, file["logits64"], 1e-12)
    for key in [key for key in file.files if key.startswith(("upd/", "out/"))]:
        recorded = file[key][..., None] if key.endswith(("/x", "/x_out")) and name == "vdim1" else file[key]
        assert_close(seen[key], recorded)


@needs_goldens
@golden
def test_logits_loss_and_gradients_equal_the_golden_numbers(name):
    file, tensors, sizes = read(name)
    model = official.transformer(tensors, name, **sizes)
    graph, parameters = nnx.split(model)
    batch = Batch(jnp.asarray(file["input_ids"], jnp.int32), jnp.asarray(file["targets"], jnp.int32))
    count = np.sum(file["targets"] != -1)

    def loss(parameters):
        return total_nats(nnx.merge(graph, parameters), batch) / count

    logits = jax.jit(lambda parameters: nnx.merge(graph, parameters)(batch.tokens))(parameters)
    assert_close(logits, file["logits64"])
    value, gradient = jax.jit(jax.value_and_grad(loss))(parameters)
    np.testing.assert_allclose(value, file["loss64"], rtol=1e-6)
    recorded = {key.removeprefix("grad64/"): file[key] for key in file.files if key.startswith("grad64/")}
    expected = nnx.state(official.transformer(recorded, name, **sizes))
    # Gradients sum over 96 tokens and three layers; relative to each parameter's largest entry.
    jax.tree.map(lambda actual, target: assert_close(actual, target, 5e-5), gradient, expected)


@needs_goldens
@golden
def test_each_module_equals_the_golden_numbers(name):
    """Each part alone, from the official code's own inputs to it: readers, norms, sublayers, gate, value, rewrite."""
    file, tensors, sizes = read(name)
    model = official.transformer(tensors, name, **sizes)
    stream = model.stream

    def state_of(key):
        recorded = file[key][..., None] if name == "vdim1" else file[key]
        return np.swapaxes(recorded, -1, -2)

    @jax.jit
    def parts(stream, state, branch, context, x, i):
        update = at(stream.updates, i)
        return update.gate(context), update.value(branch, context, x), stream.write(state, branch, context, x, i)

    updates = 2 * sizes["layers"]
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
    "small": {"layers": 12, "width": 768, "heads": 6, "head_dim": 128},
    "medium": {"layers": 24, "width": 1024, "heads": 8, "head_dim": 128},
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant, gate_hidden", COUNTS)
def test_parameter_counts_of_the_official_models(variant, gate_hidden, size):
    config = official.configuration(variant, gate_hidden, vocab_size=50304, **SIZES[size])
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))  # shapes only: nothing is allocated
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert count == COUNTS[variant, gate_hidden][list(SIZES).index(size)]
