"""Where each official tensor belongs in our model: one mapping, read in both directions.

Our layers are stacked, and q, k and v, as well as the two inputs of the MLP, are one array. So each of our parameters
is a stack of official tensors whose axes are split and put in another order.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses

import numpy as np

from ddl_jax.config import TransformerConfig
from ddl_jax.config.transformer import hidden_width
from ddl_jax.errors import InputError

Tensors = Mapping[str, np.ndarray]

EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"  # tied: the same numbers
MOST_NAMED = 400  # in a message; a model of another depth lacks hundreds


@dataclasses.dataclass(frozen=True)
class Place:
    """One of our parameters, as a stack of official tensors.

    Attributes:
        path: of the parameter in the model, joined by dots.
        names: of the official tensors, in the order in which they are stacked.
        shape: of each of them.
        split: the stack's shape with its axes split into ours.
        order: which axis of `split` each of the parameter's axes is.
        reversed: an axis of the parameter that runs the other way, such as taps: our first is the current token.
    """

    path: str
    names: Sequence[str]
    shape: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    reversed: int | None = None

    def parameter(self, tensors: Tensors) -> np.ndarray:
        """Ours from theirs."""
        stack = np.stack([tensors[name] for name in self.names])
        return self._turned(stack.reshape(self.split).transpose(self.order))

    def tensors(self, parameter: np.ndarray) -> dict[str, np.ndarray]:
        """Theirs from ours."""
        stack = self._turned(parameter).transpose(np.argsort(self.order)).reshape(len(self.names), *self.shape)
        return dict(zip(self.names, map(np.ascontiguousarray, stack), strict=True))

    def _turned(self, array: np.ndarray) -> np.ndarray:
        return array if self.reversed is None else np.flip(array, self.reversed)


def places(config: TransformerConfig) -> list[Place]:
    """Every parameter of a model with these settings (resolved, and with a counterpart in the official code)."""
    L, d, H, D, m = config.layers, config.width, config.heads, config.head_dim, hidden_width(config.width)

    def blocks(*names: str) -> list[str]:
        return [f"transformer.h.{n}.{name}" for n in range(L) for name in names]

    def gain(path: str, name: str, width: int) -> Place:
        return Place(f"blocks.{path}.gain", blocks(f"{name}.weight"), (width,), (L, width), (0, 1))

    qkv = blocks("attn.c_q.weight", "attn.c_k.weight", "attn.c_v.weight")
    mlp_input = blocks("mlp.c_fc1.weight", "mlp.c_fc2.weight")
    found = [
        Place("embedding", [EMBEDDING], (config.vocab_size, d), (config.vocab_size, d), (0, 1)),
        Place("final_norm.gain", ["ln_f.weight"], (d,), (d,), (0,)),
        gain("attention_norm", "ln_1", d),
        gain("mlp_norm", "ln_2", d),
        Place("blocks.attention.qkv", qkv, (H * D, d), (L, 3, H, D, d), (0, 4, 1, 2, 3)),
        Place("blocks.attention.output", blocks("attn.c_proj.weight"), (d, H * D), (L, d, H, D), (0, 2, 3, 1)),
        Place("blocks.mlp.input", mlp_input, (m, d), (L, 2, m, d), (0, 3, 1, 2)),
        Place("blocks.mlp.output", blocks("mlp.c_proj.weight"), (d, m), (L, d, m), (0, 2, 1)),
    ]
    if config.qk_norm:
        found += [gain("attention.query_norm", "attn.q_rms", D), gain("attention.key_norm", "attn.k_rms", D)]
    if config.head_norm or config.output_gate:
        found.append(gain("attention.head_norm", "attn.subln" if config.head_norm else "attn.o_norm", D))
    if config.output_gate:
        found.append(
            Place("blocks.attention.gate", blocks("attn.g_proj.weight"), (H * D, d), (L, H, D, d), (0, 3, 1, 2))
        )
    return found + _of_the_stream(config, blocks)


def _of_the_stream(config: TransformerConfig, blocks) -> list[Place]:
    residual, L, d = config.residual, config.layers, config.width
    V, K, G = residual.value_channels, residual.reader_taps, residual.gate.hidden

    def both(name: str) -> list[str]:
        return blocks(f"ddl_attn.{name}", f"ddl_mlp.{name}")

    def readers(name: str) -> list[str]:
        return [*blocks(f"compress.{name}"), f"readout.{name}"]

    found = []
    if residual.kind == "delta":
        out = "beta_out" if G else "beta"
        if G:
            found.append(Place("stream.updates.gate.hidden", both("beta_in.weight"), (G, d), (2 * L, G, d), (0, 2, 1)))
        found += [
            Place("stream.updates.gate.output", both(f"{out}.weight"), (1, G or d), (2 * L, G or d), (0, 1)),
            Place("stream.updates.gate.bias", both(f"{out}.bias"), (1,), (2 * L,), (0,)),
        ]
        if residual.value.constant is None:
            found += [
                Place("stream.updates.value.weight", both("v_proj.weight"), (V, d), (2 * L, V, d), (0, 1, 2)),
                Place("stream.updates.value.bias", both("v_proj.bias"), (V,), (2 * L, V), (0, 1)),
            ]
    if residual.reader == "channel":
        found.append(Place("stream.readers.taps", readers("weight"), (d, V), (L + 1, d, V), (0, 2, 1)))
    if residual.reader == "token":
        taps = readers("shortconv.weight")
        found.append(Place("stream.readers.taps", taps, (d * V, K), (L + 1, d, V, K), (0, 3, 2, 1), reversed=1))
    if residual.reader != "identity":
        found.append(Place("stream.readers.pool", readers("read"), (V,), (L + 1, V), (0, 1)))
    if residual.expansion == "convolution":
        E = residual.expansion_taps
        names = ["input_embed.conv.weight"]
        found.append(Place("stream.expansion.taps", names, (d * V, 1, E), (d, V, E), (2, 1, 0), reversed=0))
    return found


def unused(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that an official model has and does not use: the value's, where that is a constant."""
    if config.residual.value.constant is None:
        return {}
    shapes = {"weight": (config.residual.value_channels, config.width), "bias": (config.residual.value_channels,)}
    return {
        f"transformer.h.{n}.{sublayer}.v_proj.{name}": shape
        for n in range(config.layers)
        for sublayer in ("ddl_attn", "ddl_mlp")
        for name, shape in shapes.items()
    }


def require_complete(tensors: Tensors, config: TransformerConfig) -> None:
    """Checks that each tensor of a model is there, and no other, with its shape.

    Raises:
        InputError: names all that is missing, not used, or of another shape.
    """
    needed = {name: place.shape for place in places(config) for name in place.names}
    optional = {**unused(config), HEAD: needed[EMBEDDING]}
    known = needed | optional
    problems = [
        ("missing", [name for name in needed if name not in tensors]),
        ("not used", [str(name) for name in tensors if name not in known]),
        (
            "of another shape",
            [
                f"{name} {_shape(tensors[name].shape)}, not {_shape(known[name])}"
                for name in tensors
                if name in known and tuple(tensors[name].shape) != known[name]
            ],
        ),
    ]
    said = [f"{what}: {_listed(names)}" for what, names in problems if names]
    if said:
        raise InputError(f"the official tensors do not fit the options; {'; '.join(said)}")
    if HEAD in tensors and not np.array_equal(tensors[HEAD], tensors[EMBEDDING]):
        raise InputError(f"{HEAD} is not equal to {EMBEDDING}; only a tied head is supported")


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"
