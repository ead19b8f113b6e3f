"""The options of the official code, and the settings of ours that they come to, in both directions."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from ddl_jax.config import GateConfig, ResidualConfig, TransformerConfig, ValueConfig
from ddl_jax.config.rules import plain, require, require_types, shown
from ddl_jax.errors import InputError, did_you_mean

PATH = "official"  # in front of an option's name, in messages
VARIANTS = ("baseline", "vdim1", "tc", "tc_ec", "cc", "cc_ec")


@dataclasses.dataclass(frozen=True)
class Options:
    """The official keyword arguments that say what is computed, with their defaults.

    An option of another variant (`ddl_value_channels` for `vdim1`) can only have its default.
    """

    vocab_size: int = 50304
    num_hidden_layers: int = 12
    hidden_size: int = 768
    num_attention_heads: int = 6
    head_dim: int = 128
    block_size: int = 1024
    use_qk_rmsnorm: bool = True
    using_groupnorm: bool = False
    use_output_gate: bool = False
    mup: bool = False
    hidden_size_base: int = 1024
    ddl_value_channels: int = 4
    ddl_state_shortconv_kernel_size: int | None = None  # of TC 4; of CC the value channels
    input_embed_shortconv_kernel_size: int = 4
    ddl_k_eps: float = 1e-5
    ddl_beta_single_linear: bool = True
    ddl_beta_hidden_size: int = 128
    ddl_beta_init: float = 1.0  # of no effect on tensors that are there
    ddl_v_sigmoid: bool = True
    ddl_v_sigmoid_scale: float = 4.0
    ddl_v_constant: bool = False
    ddl_v_constant_value: float = 2.0
    ddl_v_dim1_constant: bool = False
    ddl_v_dim1_constant_value: float = 2.0


# Options with which the official code computes something that we do not: what it may be.
FIXED: dict[str, tuple] = {
    "use_k_shift": (False,),
    "use_v_shift": (False,),
    "q_activation": (None, "identity"),
    "k_activation": (None, "identity"),
    "v_activation": (None, "identity"),
    "rope_ratio": (1.0,),
    "rope_base": (10000.0,),
    "rms_norm_eps": (1e-5,),
    "ddl_state_dv_shortconv_causal": (False,),
    "intermediate_size": (None,),
    "mlp_hidden_mult": (8 / 3,),
    "bias": (False,),
    "dropout": (0.0,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "tie_word_embeddings": (True,),
}
# What only matters before there are tensors, or to the library that wrote the file.
WITHOUT_EFFECT = (
    "ddl_state_read_init", "embedding_init_std", "hidden_init_std_factor",
    "_name_or_path", "add_cross_attention", "architectures", "auto_map", "dtype", "is_decoder", "is_encoder_decoder",
    "kv_cache_slot_size", "model_type", "num_beam_groups", "num_beams", "num_return_sequences", "return_dict",
    "torch_dtype", "torchscript", "transformers_version", "use_bfloat16", "use_cache",
)  # fmt: skip

_OF_THE_STATE = ("ddl_value_channels", "ddl_state_shortconv_kernel_size", "ddl_v_constant", "ddl_v_constant_value")
_OF_THE_SCALAR = ("ddl_v_dim1_constant", "ddl_v_dim1_constant_value")
_OF_THE_UPDATE = tuple(
    field.name for field in dataclasses.fields(Options) if field.name.startswith(("ddl_k", "ddl_beta", "ddl_v_sigmoid"))
)
# Settings in which models may differ that compute the same: how they were started, and how they are carried out.
_CARRIED_OUT = (
    "attention", "compute_dtype", "state_dtype", "remat",
    "residual.preset", "residual.reader_initial", "residual.backward", "residual.kernel", "residual.gate.initial",
)  # fmt: skip


def known_variant(variant: str) -> str:
    """The variant in lower case; raises InputError if there is none of that name."""
    name = variant.lower().replace("-", "_")
    if name not in VARIANTS:
        raise InputError(f"variant {shown(variant)} is not known{did_you_mean(name, VARIANTS)}")
    return name


def read_options(given: Mapping[str, Any], variant: str) -> Options:
    """The options of a variant, checked.

    Raises:
        InputError: an unknown option, a value of another type, or one that is not supported here.
    """
    fields = {field.name: field.default for field in dataclasses.fields(Options)}
    for name, value in given.items():
        if name in FIXED:
            if isinstance(value, bool) != isinstance(FIXED[name][0], bool) or value not in FIXED[name]:
                legal = " or ".join(map(shown, FIXED[name]))
                raise InputError(f"{PATH}.{name} {shown(value)} is not supported; it must be {legal}")
        elif name not in fields and name not in WITHOUT_EFFECT:
            known = (*fields, *FIXED, *WITHOUT_EFFECT)
            raise InputError(f"{PATH}.{plain(str(name))} is not an option{did_you_mean(str(name), known)}")
    options = Options(**{name: value for name, value in given.items() if name in fields})
    require_types(options, PATH)
    for name in foreign(variant):
        if getattr(options, name) != fields[name]:
            raise InputError(f"{PATH}.{name} {shown(getattr(options, name))} does not apply to variant {variant!r}")
    if variant[0] in "ct":
        V, K = options.ddl_value_channels, options.ddl_state_shortconv_kernel_size
        least = V > 1
        require(options, PATH, "ddl_value_channels", least, "must be at least 2", "or variant: vdim1")
        if K is None:
            options = dataclasses.replace(options, ddl_state_shortconv_kernel_size=V if variant[0] == "c" else 4)
        elif variant[0] == "c":
            rule = f"must equal ddl_value_channels {V}: the official code fails on smaller and larger kernels"
            require(options, PATH, "ddl_state_shortconv_kernel_size", K == V, rule, f"nearest: {V}")
    return options


def foreign(variant: str) -> tuple[str, ...]:
    """The options that only other variants have."""
    others = {
        "baseline": (*_OF_THE_STATE, *_OF_THE_SCALAR, *_OF_THE_UPDATE),
        "vdim1": _OF_THE_STATE,
    }.get(variant, _OF_THE_SCALAR)
    return others if variant.endswith("_ec") else (*others, "input_embed_shortconv_kernel_size")


def configuration(options: Options, variant: str) -> TransformerConfig:
    """Our settings for the options of a variant, resolved.

    Raises:
        InputError: a size that is out of range here.
    """
    return TransformerConfig(
        layers=options.num_hidden_layers,
        width=options.hidden_size,
        heads=options.num_attention_heads,
        head_dim=options.head_dim,
        context_length=options.block_size,
        vocab_size=options.vocab_size,
        qk_norm=options.use_qk_rmsnorm,
        head_norm=options.using_groupnorm,
        output_gate=options.use_output_gate,
        logit_scale="mup" if options.mup else "none",
        logit_base_width=options.hidden_size_base if options.mup else None,
        residual=_residual(options, variant),
    ).resolve()


def _residual(options: Options, variant: str) -> ResidualConfig:
    if variant == "baseline":
        return ResidualConfig(kind="additive", preset="official_code")
    scalar, token = variant == "vdim1", variant[0] == "t"
    if scalar:
        constant, number = options.ddl_v_dim1_constant, options.ddl_v_dim1_constant_value
    else:
        constant, number = options.ddl_v_constant, options.ddl_v_constant_value
    if constant:
        value = ValueConfig(constant=number)
    elif options.ddl_v_sigmoid:
        value = ValueConfig(scale=options.ddl_v_sigmoid_scale)
    else:
        value = ValueConfig(activation="none", scale=1.0)
    convolved = variant.endswith("_ec")
    return ResidualConfig(
        preset="official_code",
        value_channels=1 if scalar else options.ddl_value_channels,
        reader="identity" if scalar else "token" if token else "channel",
        reader_taps=options.ddl_state_shortconv_kernel_size if token else None,
        expansion="convolution" if convolved else "repeat",
        expansion_taps=options.input_embed_shortconv_kernel_size if convolved else None,
        epsilon=options.ddl_k_eps,
        # Where a gate begins has no effect on one that is there, and the official code allows dead ones.
        gate=GateConfig(
            hidden=0 if options.ddl_beta_single_linear else options.ddl_beta_hidden_size,
            initial=min(max(options.ddl_beta_init, 0.01), 1.99),
        ),
        value=value,
    )


def official_options(config: TransformerConfig) -> tuple[Options, str]:
    """The official options that compute what a model of ours computes, and the variant.

    Raises:
        InputError: the official code has nothing that computes the same.
    """
    config = config.resolve()
    residual = config.residual
    if residual.kind not in ("additive", "delta"):
        kind = shown(residual.kind)
        raise InputError(
            f"model.residual.kind {kind} has no counterpart in the official code: it has additive and delta"
        )
    variant = _variant(residual)
    options = {
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        "head_dim": config.head_dim,
        "block_size": config.context_length,
        "use_qk_rmsnorm": config.qk_norm,
        "using_groupnorm": config.head_norm,
        "use_output_gate": config.output_gate,
        "mup": config.logit_scale == "mup",
        "hidden_size_base": config.logit_base_width or 1024,
    }
    if variant != "baseline":
        gate, value, state = residual.gate, residual.value, "dim1_" if variant == "vdim1" else ""
        options |= {"ddl_k_eps": residual.epsilon, "ddl_beta_init": gate.initial}
        if gate.hidden:
            options |= {"ddl_beta_single_linear": False, "ddl_beta_hidden_size": gate.hidden}
        if value.constant is not None:
            options |= {f"ddl_v_{state}constant": True, f"ddl_v_{state}constant_value": value.constant}
        elif value.activation == "sigmoid":
            options |= {"ddl_v_sigmoid_scale": value.scale}
        else:
            options |= {"ddl_v_sigmoid": False}
        if residual.reader != "identity":
            options |= {"ddl_value_channels": residual.value_channels}
            taps = residual.reader_taps if residual.reader == "token" else residual.value_channels
            options |= {"ddl_state_shortconv_kernel_size": taps}
        if residual.expansion == "convolution":
            options |= {"input_embed_shortconv_kernel_size": residual.expansion_taps}
    found = read_options(options, variant)
    _require_equal(config, configuration(found, variant))
    return found, variant


def _variant(residual: ResidualConfig) -> str:
    if residual.kind == "additive":
        return "baseline"
    if residual.reader == "identity":
        return "vdim1"
    return {"token": "tc", "channel": "cc"}[residual.reader] + ("_ec" if residual.expansion == "convolution" else "")


def _require_equal(ours: Any, theirs: Any, path: str = "") -> None:
    """Raises InputError at the first setting in which what we have is not what the official code computes."""
    for field in dataclasses.fields(ours):
        mine, other, name = getattr(ours, field.name), getattr(theirs, field.name), f"{path}{field.name}"
        if dataclasses.is_dataclass(mine):
            _require_equal(mine, other, f"{name}.")
        elif mine != other and name not in _CARRIED_OUT:
            raise InputError(
                f"model.{name} {shown(mine)} has no counterpart in the official code, where it is {shown(other)}"
            )
