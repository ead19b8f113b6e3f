"""The official model written out in float64 NumPy from its equations, and its tensors put into our Transformer.

Tensors are named as in an official state dictionary. `forward` is what the tests compare with; it shares nothing with
`ddl_jax` but those names.
"""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from ddl_jax.config import GateConfig, ResidualConfig, TransformerConfig
from ddl_jax.transformer import Transformer

VARIANTS = ("baseline", "vdim1", "tc", "tc_ec", "cc", "cc_ec")
V, TAPS = 4, 4


def configuration(variant, gate_hidden=0, **sizes):
    """Our configuration of an official variant."""
    if variant == "baseline":
        return TransformerConfig(residual=ResidualConfig(kind="additive"), **sizes)
    residual = ResidualConfig(
        preset="official_code",
        value_channels=1 if variant == "vdim1" else V,
        reader={"v": "identity", "t": "token", "c": "channel"}[variant[0]],
        expansion="convolution" if variant.endswith("_ec") else "repeat",
        gate=GateConfig(hidden=gate_hidden),
    )
    return TransformerConfig(residual=residual, **sizes)


def shapes(variant, layers, width, heads, head_dim, vocab_size, gate_hidden=0):
    """Name → shape of every official tensor (the tied `lm_head.weight` left out)."""
    d, inner, hidden = width, heads * head_dim, 8 * width // 3
    channels = 1 if variant == "vdim1" else V
    compressor = {"c": {"weight": (d, TAPS), "read": (V,)}, "t": {"shortconv.weight": (d * V, TAPS), "read": (V,)}}.get(
        variant[0], {}
    )
    found = {"transformer.wte.weight": (vocab_size, d), "ln_f.weight": (d,)}
    found |= {f"readout.{name}": shape for name, shape in compressor.items()}
    if variant.endswith("_ec"):
        found["input_embed.conv.weight"] = (d * V, 1, TAPS)
    for n in range(layers):
        block = {f"compress.{name}": shape for name, shape in compressor.items()}
        block |= {f"attn.c_{p}.weight": (inner, d) for p in "qkv"} | {"attn.c_proj.weight": (d, inner)}
        block |= {f"attn.{p}_rms.weight": (head_dim,) for p in "qk"}
        block |= {"mlp.c_fc1.weight": (hidden, d), "mlp.c_fc2.weight": (hidden, d), "mlp.c_proj.weight": (d, hidden)}
        block |= {"ln_1.weight": (d,), "ln_2.weight": (d,)}
        if variant != "baseline":
            for sublayer in ("ddl_attn", "ddl_mlp"):
                gate = {"beta.weight": (1, d), "beta.bias": (1,)}
                if gate_hidden:
                    gate = {
                        "beta_in.weight": (gate_hidden, d),
                        "beta_out.weight": (1, gate_hidden),
                        "beta_out.bias": (1,),
                    }
                gate |= {"v_proj.weight": (channels, d), "v_proj.bias": (channels,)}
                block |= {f"{sublayer}.{name}": shape for name, shape in gate.items()}
        found |= {f"transformer.h.{n}.{name}": shape for name, shape in block.items()}
    return found


def random_tensors(seed=0, **model):
    """Generic tensors: gains and biases as different from their start as the rest."""
    rng = np.random.default_rng(seed)

    def draw(name, shape):
        return rng.standard_normal(shape) * 0.3 + (0.5 if len(shape) == 1 else 0.0)

    return {name: draw(name, shape).astype(np.float32) for name, shape in shapes(**model).items()}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms_norm(x, gain):
    return gain * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5)


def rope(x):
    """x (B, T, H, D): pairs (i, i + D/2) turned by t · 10000^(−2i/D), pair by pair."""
    turned = np.empty_like(x)
    half = x.shape[-1] // 2
    position = np.arange(x.shape[1])[None, :, None]
    for i in range(half):
        angle = position * 10000.0 ** (-2 * i / x.shape[-1])
        first, second = x[..., i], x[..., i + half]
        turned[..., i] = first * np.cos(angle) - second * np.sin(angle)
        turned[..., i + half] = second * np.cos(angle) + first * np.sin(angle)
    return turned


def attention(p, c, head_dim):
    batch, tokens, _ = c.shape
    q, k, v = (np.reshape(c @ p[f"attn.c_{name}.weight"].T, (batch, tokens, -1, head_dim)) for name in "qkv")
    q, k = rope(q), rope(k)
    if "attn.q_rms.weight" in p:
        q, k = rms_norm(q, p["attn.q_rms.weight"]), rms_norm(k, p["attn.k_rms.weight"])
    mixed = np.zeros_like(v)
    for t in range(tokens):  # each token looks at itself and what came before
        scores = np.einsum("bhd,bshd->bhs", q[:, t], k[:, : t + 1]) / np.sqrt(head_dim)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed[:, t] = np.einsum("bhs,bshd->bhd", weights, v[:, : t + 1])
    for norm in ("attn.subln.weight", "attn.o_norm.weight"):
        if norm in p:
            mixed = rms_norm(mixed, p[norm])
    if "attn.g_proj.weight" in p:
        gate = c @ p["attn.g_proj.weight"].T
        mixed = mixed * (gate * sigmoid(gate)).reshape(mixed.shape)
    return mixed.reshape(batch, tokens, -1) @ p["attn.c_proj.weight"].T


def mlp(p, c):
    inner = c @ p["mlp.c_fc1.weight"].T
    return (inner * sigmoid(inner) * (c @ p["mlp.c_fc2.weight"].T)) @ p["mlp.c_proj.weight"].T


def expand(p, e, channels):
    """State (B, T, d, V) as the official code has it."""
    batch, tokens, d = e.shape
    if "input_embed.conv.weight" not in p:
        return np.repeat(e[..., None], channels, axis=-1)
    kernel = p["input_embed.conv.weight"].reshape(d, channels, TAPS)
    state = np.zeros((batch, tokens, d, channels))
    for t in range(tokens):
        for tap in range(TAPS):
            source = t - (TAPS - 1 - tap)
            if source >= 0:
                state[:, t] += e[:, source, :, None] * kernel[:, :, tap]
    return state


def compress(p, state):
    """`p` holds a compressor's tensors, or none: then the state has one channel."""
    if not p:
        return state[..., 0]
    _, tokens, d, channels = state.shape
    mixed = np.zeros_like(state)
    if "weight" in p:
        for u in range(channels):
            for tap in range(TAPS):
                source = u + tap - (TAPS - 1) // 2
                if 0 <= source < channels:
                    mixed[..., u] += p["weight"][:, tap] * state[..., source]
    else:
        kernel = p["shortconv.weight"].reshape(d, channels, TAPS)
        for t in range(tokens):
            for tap in range(TAPS):
                source = t - (TAPS - 1 - tap)
                if source >= 0:
                    mixed[:, t] += kernel[:, :, tap] * state[:, source]
    return mixed @ p["read"]


def part(tensors, prefix):
    """The tensors under a prefix, in float64, without it."""
    return {name[len(prefix) :]: np.asarray(a, np.float64) for name, a in tensors.items() if name.startswith(prefix)}


def forward(tensors, tokens, head_dim, layers):
    """Logits, and the intermediate arrays under the names the golden files use."""
    everything = part(tensors, "")
    embedding = everything["transformer.wte.weight"]
    plain = "transformer.h.0.ddl_attn.v_proj.weight" not in everything
    channels = 1 if plain else len(everything["transformer.h.0.ddl_attn.v_proj.weight"])
    state = expand(everything, embedding[tokens], channels)
    seen = {}
    for n in range(layers):
        p = part(tensors, f"transformer.h.{n}.")
        compressor = part(p, "compress.")
        for i, (norm, sublayer, ddl) in enumerate((("ln_1", "attn", "ddl_attn."), ("ln_2", "mlp", "ddl_mlp."))):
            x = compress(compressor, state)
            c = rms_norm(x, p[f"{norm}.weight"])
            h = attention(p, c, head_dim) if sublayer == "attn" else mlp(p, c)
            record = {"x": state, "k_in": h, "context": c, "v_in": x}
            if plain:
                state = state + h[..., None]
            else:
                g = part(p, ddl)
                if "beta.weight" in g:
                    logit = c @ g["beta.weight"].T + g["beta.bias"]
                else:
                    logit = np.tanh(c @ g["beta_in.weight"].T) @ g["beta_out.weight"].T + g["beta_out.bias"]
                record |= {"beta_logit": logit, "v_logit": x @ g["v_proj.weight"].T + g["v_proj.bias"]}
                k = h / np.sqrt(np.sum(h * h, axis=-1, keepdims=True) + 1e-5**2)
                β, v = 2 * sigmoid(logit), 4 * sigmoid(record["v_logit"])
                readout = np.einsum("btd,btdv->btv", k, state)
                state = state + k[..., None] * (β * (v - readout))[:, :, None]
            seen |= {f"upd/{2 * n + i}/{name}": array for name, array in record.items()}
            seen[f"upd/{2 * n + i}/x_out"] = state
    seen["out/readout"] = compress(part(tensors, "readout."), state)
    seen["out/final"] = rms_norm(seen["out/readout"], everything["ln_f.weight"])
    return seen["out/final"] @ embedding.T, seen


def transformer(tensors, variant, *, layers, width, heads, head_dim, vocab_size, gate_hidden=0, **options):
    """Our Transformer with the official tensors; every one of them must find its place, and every place its tensor."""
    d, H, D, L = width, heads, head_dim, layers
    sizes = {"layers": L, "width": d, "heads": H, "head_dim": D, "vocab_size": vocab_size}
    config = configuration(variant, gate_hidden, compute_dtype="float32", state_dtype="float32", **sizes, **options)
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    left = {name: np.asarray(array) for name, array in tensors.items() if name != "lm_head.weight"}

    def blocks(name):
        return np.stack([left.pop(f"transformer.h.{n}.{name}") for n in range(L)])

    def both(name):
        return np.stack([left.pop(f"transformer.h.{n}.{s}.{name}") for n in range(L) for s in ("ddl_attn", "ddl_mlp")])

    def readers(name):
        return np.concatenate([blocks(f"compress.{name}"), left.pop(f"readout.{name}")[None]])

    projections = np.stack([blocks(f"attn.c_{n}.weight") for n in "qkv"], 1)
    placed = {
        "embedding": left.pop("transformer.wte.weight"),
        "final_norm/gain": left.pop("ln_f.weight"),
        "blocks/attention_norm/gain": blocks("ln_1.weight"),
        "blocks/mlp_norm/gain": blocks("ln_2.weight"),
        "blocks/attention/qkv": projections.reshape(L, 3, H, D, d).transpose(0, 4, 1, 2, 3),
        "blocks/attention/output": blocks("attn.c_proj.weight").reshape(L, d, H, D).transpose(0, 2, 3, 1),
        "blocks/attention/query_norm/gain": blocks("attn.q_rms.weight"),
        "blocks/attention/key_norm/gain": blocks("attn.k_rms.weight"),
        "blocks/mlp/input": np.stack([blocks("mlp.c_fc1.weight"), blocks("mlp.c_fc2.weight")], 1).transpose(0, 3, 1, 2),
        "blocks/mlp/output": blocks("mlp.c_proj.weight").transpose(0, 2, 1),
    }  # fmt: skip
    if variant != "baseline":
        if gate_hidden:
            placed["stream/updates/gate/hidden"] = both("beta_in.weight").transpose(0, 2, 1)
        out = "beta_out" if gate_hidden else "beta"
        placed["stream/updates/gate/output"] = both(f"{out}.weight")[:, 0]
        placed["stream/updates/gate/bias"] = both(f"{out}.bias")[:, 0]
        placed["stream/updates/value/weight"] = both("v_proj.weight")
        placed["stream/updates/value/bias"] = both("v_proj.bias")
    if variant[0] == "c":
        placed["stream/readers/taps"] = readers("weight").transpose(0, 2, 1)
    if variant[0] == "t":  # our first tap is the current token, theirs the last
        taps = readers("shortconv.weight").reshape(L + 1, d, V, TAPS)
        placed["stream/readers/taps"] = taps.transpose(0, 3, 2, 1)[:, ::-1]
    if variant[0] in "ct":
        placed["stream/readers/pool"] = readers("read")
    if variant.endswith("_ec"):
        placed["stream/expansion/taps"] = (
            left.pop("input_embed.conv.weight").reshape(d, V, TAPS).transpose(2, 1, 0)[::-1]
        )
    assert not left, f"no place for {sorted(left)}"

    graph, parameters = nnx.split(model)
    flat = {"/".join(map(str, path)): path for path, _ in nnx.to_flat_state(parameters)}
    assert set(flat) == set(placed)
    for name, path in flat.items():
        assert dict(nnx.to_flat_state(parameters))[path].shape == placed[name].shape, name
    leaves = [jnp.asarray(placed["/".join(map(str, path))]) for path, _ in nnx.to_flat_state(parameters)]
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(parameters), leaves))
