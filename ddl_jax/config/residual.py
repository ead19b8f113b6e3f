"""The settings of the residual stream, and the two presets."""

import dataclasses
from typing import Any, Literal

from ddl_jax.config.kernels import unsupported
from ddl_jax.config.rules import filled, require, require_between, require_least, require_types, require_unset

Kind = Literal["additive", "additive_expanded", "write_only", "delta", "hyper_connections", "mhc"]
Reader = Literal["identity", "channel", "token"]
Expansion = Literal["repeat", "convolution"]
Direction = Literal["sublayer", "mlp", "attention"]
Preset = Literal["paper", "official_code"]
Kernel = Literal["auto", "xla", "pallas"]
Backward = Literal["saved", "reversible"]

EDITS = ("write_only", "delta")  # the kinds with a gate, a value and a direction
HYPER = ("hyper_connections", "mhc")  # the kinds that mix their channels, there called streams

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
            of the same expanded state; `additive` is the plain Transformer. `hyper_connections` (arXiv 2409.19606) and
            `mhc` (2512.24880) keep the channels as streams, which learned matrices read, write and mix.
        value_channels: V, the number of channels of the state, 1 to 8 (4; `additive` has 1, `mhc` at least 2).
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
        backward: what backward does for the states between sublayers: keeps them all (`saved`), or walks back from the
            last one, undoing each edit (`reversible`, the default of kinds with an update). A stream that is read and
            written one sublayer at a time keeps them.
        kernel: what computes writes and token reads: `pallas` (on a CPU interpreted, slow), `xla`, or `auto`: Pallas
            where the program is compiled for a Hopper GPU and the kernels take the state, else XLA. The additive kinds
            write with XLA.
        dynamic: whether the matrices of `hyper_connections` depend on the token (true), or are learned numbers.
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
    backward: Backward | None = None
    kernel: Kernel = "auto"
    dynamic: bool | None = None
    gate: GateConfig = GateConfig()
    value: ValueConfig = ValueConfig()

    def resolve(self, width: int, path: str = "model.residual") -> "ResidualConfig":
        """Fills in every field left None, for a state of the given width; raises InputError on a broken rule."""
        for section, name in ((self, path), (self.gate, f"{path}.gate"), (self.value, f"{path}.value")):
            require_types(section, name)
        preset, additive = PRESETS[self.preset], self.kind == "additive"
        config = filled(self, value_channels=1 if additive else 4)
        if additive:
            single = config.value_channels == 1
            rule = "must be 1 with kind 'additive'"
            require(config, path, "value_channels", single, rule, "nearest: 1, or kind: additive_expanded")
        require_between(config, path, "value_channels", 1, 8)
        if self.kind == "hyper_connections":
            config = filled(config, dynamic=True)
        else:
            require_unset(config, path, ("dynamic",), f"kind is {self.kind!r}, not 'hyper_connections'")
        if self.kind in HYPER:
            return config._resolve_streams(path)
        single = config.value_channels == 1
        reader, expansion = ("identity", "repeat") if single else ("channel", "convolution")
        config = filled(config, reader=reader, expansion=expansion)._resolve_reader(path, preset["stream"])
        if config.expansion == "convolution":
            config = filled(config, expansion_taps=4)
            require_least(config, path, 1, "expansion_taps")
        else:
            require_unset(config, path, ("expansion_taps",), "expansion is 'repeat'")
        if config.kernel == "pallas":
            config._require_kernels(width, path)
        if config.kind in EDITS:
            return config._resolve_update(width, path, preset)
        config._require_no_update(path)
        return config

    def _require_no_update(self, path: str) -> None:
        because = f"kind {self.kind!r} has no gate, value or direction"
        require_unset(self, path, ("direction", "direction_width", "epsilon", "backward"), because)
        for name in ("gate", "value"):
            section = getattr(self, name)
            fields = tuple(field.name for field in dataclasses.fields(section))
            require_unset(section, f"{path}.{name}", fields, because)

    def _resolve_streams(self, path: str) -> "ResidualConfig":
        if self.kind == "mhc":
            alone = "must be at least 2 with kind 'mhc': a stream alone has nothing to mix with"
            require(self, path, "value_channels", self.value_channels >= 2, alone, "nearest: 2")
        config = filled(self, expansion="repeat")
        rule = f"must be 'repeat' with kind {self.kind!r}, whose streams start as copies of the embedding"
        require(config, path, "expansion", config.expansion == "repeat", rule)
        readers = ("reader", "reader_taps", "reader_form", "reader_initial", "shared_reader")
        require_unset(config, path, readers, f"kind {self.kind!r} reads its streams by matrices of its own")
        require_unset(config, path, ("expansion_taps",), "expansion is 'repeat'")
        require(config, path, "kernel", config.kernel != "pallas", f"does not apply: kind {self.kind!r} has no kernels",
                "use 'auto'")  # fmt: skip
        config._require_no_update(path)
        return config

    def _require_kernels(self, width: int, path: str) -> None:
        reasons = unsupported(self, width)
        rule = f"does not apply: kind {self.kind!r} with reader {self.reader!r} has no kernels"
        require(self, path, "kernel", bool(reasons), rule, "use 'auto'")
        for reason in reasons.values():
            require(self, path, "kernel", reason is None, f"cannot run: {reason}", "or use 'auto'")

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
        config = filled(config, shared_reader=preset["shared_reader"], reader_initial=preset["reader_initial"])
        if config.reader == "token":
            require_unset(config, path, ("reader_form",), "reader is 'token'")
            config = filled(config, reader_taps=4)
            require_least(config, path, 1, "reader_taps")
            return config
        require_unset(config, path, ("reader_taps",), "reader is 'channel'")
        return filled(config, reader_form=preset["reader_form"])

    def _resolve_update(self, width: int, path: str, preset: dict[str, dict[str, Any]]) -> "ResidualConfig":
        config = filled(self, direction="sublayer", epsilon=1e-5, backward="reversible")
        # Below 1e-18, ε² vanishes in float32 and a zero branch divides by zero.
        require_between(config, path, "epsilon", 1e-18, 1.0, " (the paper uses 1e-5)")
        sublayer = config.direction == "sublayer"
        if sublayer:
            require_unset(config, path, ("direction_width",), "direction is 'sublayer'")
        else:
            config = filled(config, direction_width=max(1, width // 4))
            require_least(config, path, 1, "direction_width")

        gate, where = filled(config.gate, hidden=0, initial=1.0), f"{path}.gate"
        require_least(gate, where, 0, "hidden")
        if gate.hidden == 0:
            require_unset(gate, where, ("hidden_bias",), "gate.hidden is 0")
        else:
            gate = filled(gate, **preset["gate"])
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
                value = filled(value, source="branch")
                require(value, where, "source", value.source == "branch", unused, "use 'branch'")
            value = filled(value, **preset["value"])
            require(value, where, "scale", value.scale != 0, "must not be 0", "the paper uses 1.0")
        return dataclasses.replace(config, gate=gate, value=value)
