"""Official weights, options and variants: the numbers they give, the way back, and what is refused."""

from flax import nnx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ddl_jax import ResidualConfig, Transformer, TransformerConfig
from ddl_jax.errors import InputError
from ddl_jax.interop import from_official, to_official
from ddl_jax.training.step import Batch, total_nats
from tests import official
from tests.quick import QUICK

TINY = {"num_hidden_layers": 2, "hidden_size": 12, "num_attention_heads": 2, "head_dim": 8, "vocab_size": 19,
        "block_size": 8}  # fmt: skip
# Every option, each with some variant.
OPTIONS = {
    "baseline": {"using_groupnorm": True, "mup": True, "hidden_size_base": 36},
    "vdim1": {"ddl_v_dim1_constant": True, "ddl_v_dim1_constant_value": 1.5, "ddl_beta_single_linear": False,
              "ddl_beta_hidden_size": 5, "use_qk_rmsnorm": False},
    "tc": {"ddl_value_channels": 3, "ddl_state_shortconv_kernel_size": 2, "ddl_v_sigmoid": False, "ddl_k_eps": 0.3,
           "use_output_gate": True},
    "tc_ec": {"ddl_value_channels": 2, "ddl_state_shortconv_kernel_size": 5, "input_embed_shortconv_kernel_size": 1,
              "ddl_v_constant": True, "ddl_v_constant_value": 0.7},
    "cc": {"ddl_value_channels": 3, "ddl_state_shortconv_kernel_size": 3, "ddl_v_sigmoid_scale": 3.0,
           "use_output_gate": True, "using_groupnorm": True},
    "cc_ec": {"input_embed_shortconv_kernel_size": 3, "ddl_beta_single_linear": False, "ddl_beta_hidden_size": 5,
              "mup": True},
}  # fmt: skip
CASES = [(variant, TINY | more) for variant in OPTIONS for more in ({}, OPTIONS[variant])]
plain = pytest.mark.parametrize("variant", official.VARIANTS)
cases = pytest.mark.parametrize("variant, options", CASES, ids=lambda x: x if isinstance(x, str) else len(x))


def tokens_of(options):
    return np.random.default_rng(0).integers(0, options["vocab_size"], (2, options["block_size"]))


def difference(actual, expected):
    return np.linalg.norm(np.asarray(actual, np.float64) - expected) / np.linalg.norm(expected)


@plain
def test_float32_logits_equal_the_equations(variant):
    tensors = official.random_tensors(variant, TINY)
    model = from_official(TINY, tensors, variant)
    logits = jax.jit(lambda model, tokens: model(tokens), compiler_options=QUICK)(model, tokens_of(TINY))
    assert logits.dtype == jnp.float32
    # Through generic weights, whose norms are above 1, errors grow.
    assert difference(logits, official.forward(tensors, tokens_of(TINY), variant, TINY)[0]) < 1e-5


@pytest.mark.parametrize("variant", OPTIONS)
def test_float64_logits_and_gradients_equal_the_equations_with_every_option(variant):
    """The gradient by central differences of the NumPy loss, along one direction in which all tensors move."""
    options = TINY | OPTIONS[variant]
    rng = np.random.default_rng(1)
    tensors = {name: a.astype(np.float64) for name, a in official.random_tensors(variant, options).items()}
    direction = {name: rng.standard_normal(a.shape) for name, a in tensors.items()}
    tokens = tokens_of(options)
    targets = np.roll(tokens, -1, axis=1)

    def nats(step):
        moved = {name: a + step * direction[name] for name, a in tensors.items()}
        logits, _ = official.forward(moved, tokens, variant, options)
        chosen = np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return np.sum(np.log(np.sum(np.exp(logits), axis=-1)) - chosen)

    with jax.enable_x64(True):
        model = from_official(options, tensors, variant)
        graph, parameters = nnx.split(model)
        batch = Batch(*(jnp.asarray(a, jnp.int32) for a in (tokens, targets)))

        def loss(parameters):
            model = nnx.merge(graph, parameters)
            return total_nats(model, batch), model(batch.tokens)

        function = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)
        (total, logits), gradient = function(parameters)
        _, slopes, _ = to_official(nnx.merge(graph, gradient))
    assert logits.dtype == jnp.float64
    assert difference(logits, official.forward(tensors, tokens, variant, options)[0]) < 1e-9
    np.testing.assert_allclose(total, nats(0.0), rtol=1e-9)
    expected = (nats(1e-6) - nats(-1e-6)) / 2e-6
    del slopes["lm_head.weight"]  # tied: its part is in the embedding's
    # Seen: 4e-7, from the difference's next term (a hundred times that at a step of 1e-5).
    np.testing.assert_allclose(sum(np.sum(slopes[name] * direction[name]) for name in slopes), expected, rtol=3e-6)


@cases
def test_there_and_back_nothing_is_changed(variant, options):
    tensors = official.random_tensors(variant, options)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    model = from_official(options, tensors, variant.upper())
    given, back, name = to_official(model)
    assert name == variant
    assert given.items() >= options.items()
    assert set(back) == set(tensors)
    constant = options.get("ddl_v_constant") or options.get("ddl_v_dim1_constant")
    for tensor, array in back.items():
        unused = constant and ".v_proj." in tensor
        np.testing.assert_array_equal(array, np.zeros_like(array) if unused else tensors[tensor], err_msg=tensor)
        assert array.dtype == np.float32 and array.shape == tensors[tensor].shape
    again = from_official(given, back, name)
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))


@plain
def test_the_model_is_one_of_ours_with_the_official_preset(variant):
    model = from_official(TINY, official.random_tensors(variant, TINY), variant)
    assert model.config.residual.preset == "official_code"
    assert model.config == model.config.resolve()
    fresh = nnx.eval_shape(lambda: Transformer(model.config, rngs=nnx.Rngs(0)))
    describe = lambda p: (p.shape, p.dtype, p.get_metadata("role"), p.get_metadata("axes"))  # noqa: E731
    is_parameter = lambda node: isinstance(node, nnx.Variable)  # noqa: E731
    found, expected = (jax.tree.map(describe, nnx.state(m), is_leaf=is_parameter) for m in (model, fresh))
    assert found == expected


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_tensors_of_other_dtypes_become_float32_and_with_64_bits_float64(dtype):
    tensors = {name: a.astype(dtype) for name, a in official.random_tensors("vdim1", TINY).items()}
    for wide in (False, True):
        with jax.enable_x64(wide):
            model = from_official(TINY, tensors, "vdim1")
        expected = np.float64 if wide else np.float32
        assert all(leaf.dtype == expected for leaf in jax.tree.leaves(nnx.state(model)))
        _, back, _ = to_official(model)
        for name in tensors:
            np.testing.assert_array_equal(back[name], tensors[name].astype(expected))


def test_dtypes_are_those_asked_for():
    tensors = official.random_tensors("cc", TINY)
    model = from_official(TINY, tensors, "cc", compute_dtype="bfloat16", state_dtype="float32")
    assert (model.config.compute_dtype, model.config.state_dtype) == ("bfloat16", "float32")
    assert from_official(TINY, tensors, "cc").config.compute_dtype == "auto"


def test_float64_needs_64_bits():
    with pytest.raises(InputError, match="float64 needs jax_enable_x64"):
        from_official(TINY, official.random_tensors("cc", TINY), "cc", compute_dtype="float64")


REFUSED = [
    ("cc", {"use_k_shift": True}, "official.use_k_shift true is not supported; it must be false"),
    ("cc", {"use_v_shift": True}, "official.use_v_shift true is not supported; it must be false"),
    ("vdim1", {"q_activation": "silu"}, "official.q_activation 'silu' is not supported; it must be null or 'identity'"),
    ("tc", {"rope_ratio": 0.5}, "official.rope_ratio 0.5 is not supported; it must be 1.0"),
    ("cc", {"ddl_state_dv_shortconv_causal": True}, "official.ddl_state_dv_shortconv_causal true is not supported"),
    ("baseline", {"intermediate_size": 8}, "official.intermediate_size 8 is not supported; it must be null"),
    ("cc", {"hiden_size": 8}, "official.hiden_size is not an option; did you mean 'hidden_size'?"),
    ("cc", {"hidden_size": "12"}, "official.hidden_size '12' must be an integer"),
    ("cc", {"mup": 1}, "official.mup 1 must be true or false"),
    (
        "cc",
        {"ddl_state_shortconv_kernel_size": 3},
        "official.ddl_state_shortconv_kernel_size 3 must equal ddl_value_c",
    ),
    ("tc", {"ddl_value_channels": 1}, "official.ddl_value_channels 1 must be at least 2; or variant: vdim1"),
    ("tc", {"ddl_value_channels": 9}, "model.residual.value_channels 9 must lie in [1, 8]; nearest: 8"),
    ("vdim1", {"ddl_value_channels": 2}, "official.ddl_value_channels 2 does not apply to variant 'vdim1'"),
    ("vdim1", {"ddl_v_constant": True}, "official.ddl_v_constant true does not apply to variant 'vdim1'"),
    ("tc", {"ddl_v_dim1_constant": True}, "official.ddl_v_dim1_constant true does not apply to variant 'tc'"),
    ("baseline", {"ddl_k_eps": 0.1}, "official.ddl_k_eps 0.1 does not apply to variant 'baseline'"),
    ("tc", {"input_embed_shortconv_kernel_size": 2}, "official.input_embed_shortconv_kernel_size 2 does not apply"),
    ("cc_e", {}, "variant 'cc_e' is not known; did you mean 'cc_ec'?"),
    ("cc", {"head_dim": 7}, "model.head_dim 7 must be even for RoPE; nearest: 6, 8"),
]


@pytest.mark.parametrize("variant, options, message", REFUSED, ids=lambda x: x if isinstance(x, str) else None)
def test_options_that_are_refused(variant, options, message):
    with pytest.raises(InputError) as error:
        from_official(TINY | options, {}, variant)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_options_without_effect_are_taken():
    tensors = official.random_tensors("cc", TINY)
    options = {"k_activation": "identity", "rope_ratio": 1, "dropout": 0, "ddl_state_read_init": 0.1,
               "architectures": ["GPT"], "ddl_beta_init": 0.0, "ddl_v_dim1_constant": False}  # fmt: skip
    assert from_official(TINY | options, tensors, "Cc").config.residual.gate.initial == 0.01


def test_every_tensor_that_does_not_fit_is_named():
    tensors = official.random_tensors("cc", TINY)
    for name in ("ln_f.weight", "transformer.h.1.attn.c_k.weight"):
        del tensors[name]
    tensors |= {"transformer.h.2.ln_1.weight": np.ones(12), "extra": np.ones(1), "readout.read": np.ones(5)}
    with pytest.raises(InputError) as error:
        from_official(TINY, tensors, "cc")
    assert str(error.value) == (
        "the official tensors do not fit the options; missing: ln_f.weight, transformer.h.1.attn.c_k.weight; "
        "not used: transformer.h.2.ln_1.weight, extra; of another shape: readout.read (5), not (4)"
    )


def test_tensors_that_are_no_numbers_and_heads_that_are_not_tied_are_refused():
    tensors = official.random_tensors("cc", TINY)
    head = tensors["transformer.wte.weight"] + 1
    with pytest.raises(InputError, match="lm_head.weight is not equal to transformer.wte.weight; only a tied head"):
        from_official(TINY, tensors | {"lm_head.weight": head}, "cc")
    with pytest.raises(InputError, match="ln_f.weight has dtype int64, but has to be of floating-point"):
        from_official(TINY, tensors | {"ln_f.weight": np.ones(12, np.int64)}, "cc")
    for number in (np.nan, 1e300):
        with pytest.raises(InputError, match="ln_f.weight holds numbers that are not finite as float32"):
            from_official(TINY, tensors | {"ln_f.weight": np.full(12, number)}, "cc")


def test_the_value_of_a_constant_may_be_left_out():
    options = TINY | OPTIONS["tc_ec"]
    tensors = official.random_tensors("tc_ec", options)
    used = {name: a for name, a in tensors.items() if ".v_proj." not in name}
    states = [nnx.state(from_official(options, each, "tc_ec")) for each in (tensors, used)]
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.parametrize(
    "residual, message",
    [
        ({"kind": "write_only"}, "model.residual.kind 'write_only' has no counterpart in the official code"),
        ({"kind": "additive_expanded"}, "model.residual.kind 'additive_expanded' has no counterpart"),
        ({"kind": "mhc"}, "model.residual.kind 'mhc' has no counterpart in the official code"),
        ({}, "model.residual.reader_form 'direct' has no counterpart in the official code, where it is 'convolution'"),
        ({"direction": "mlp", "preset": "official_code"}, "model.residual.direction 'mlp' has no counterpart"),
        ({"shared_reader": False, "preset": "official_code"}, "model.residual.shared_reader false has no counterpart"),
        ({"value_channels": 1}, "model.residual.value.source 'context' has no counterpart in the official code"),
    ],
    ids=str,
)
def test_models_without_a_counterpart_are_refused(residual, message):
    config = TransformerConfig(layers=1, width=8, heads=1, vocab_size=5, residual=ResidualConfig(**residual))
    with pytest.raises(InputError) as error:
        to_official(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    assert str(error.value).startswith(message)
