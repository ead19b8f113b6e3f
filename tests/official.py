"""The official model written out in float64 NumPy from its equations.

Tensors and options are named as in the official code. `forward` is what the tests compare with; it shares nothing with
`ddl_jax` but those names.
"""

import numpy as np

VARIANTS = ("baseline", "vdim1", "tc", "tc_ec", "cc", "cc_ec")
DEFAULTS = {
    "use_qk_rmsnorm": True, "using_groupnorm": False, "use_output_gate": False, "mup": False, "hidden_size_base": 1024,
    "ddl_value_channels": 4, "ddl_state_shortconv_kernel_size": 4, "input_embed_shortconv_kernel_size": 4,
    "ddl_k_eps": 1e-5, "ddl_beta_single_linear": True, "ddl_beta_hidden_size": 128,
    "ddl_v_sigmoid": True, "ddl_v_sigmoid_scale": 4.0, "ddl_v_constant": False, "ddl_v_constant_value": 2.0,
    "ddl_v_dim1_constant": False, "ddl_v_dim1_constant_value": 2.0,
}  # fmt: skip


def shapes(variant, options):
    """Name → shape of every official tensor (the tied `lm_head.weight` left out)."""
    o = DEFAULTS | options
    d, D, taps = o["hidden_size"], o["head_dim"], o["ddl_state_shortconv_kernel_size"]
    hidden = 8 * d // 3
    inner, V = o["num_attention_heads"] * D, 1 if variant == "vdim1" else o["ddl_value_channels"]
    compressor = {"c": {"weight": (d, taps), "read": (V,)}, "t": {"shortconv.weight": (d * V, taps), "read": (V,)}}.get(
        variant[0], {}
    )
    found = {"transformer.wte.weight": (o["vocab_size"], d), "ln_f.weight": (d,)}
    found |= {f"readout.{name}": shape for name, shape in compressor.items()}
    if variant.endswith("_ec"):
        found["input_embed.conv.weight"] = (d * V, 1, o["input_embed_shortconv_kernel_size"])
    for n in range(o["num_hidden_layers"]):
        block = {f"compress.{name}": shape for name, shape in compressor.items()}
        block |= {f"attn.c_{p}.weight": (inner, d) for p in "qkv"} | {"attn.c_proj.weight": (d, inner)}
        if o["use_qk_rmsnorm"]:
            block |= {f"attn.{p}_rms.weight": (D,) for p in "qk"}
        if o["using_groupnorm"]:
            block["attn.subln.weight"] = (D,)
        if o["use_output_gate"]:
            block["attn.g_proj.weight"] = (inner, d)
            if not o["using_groupnorm"]:
                block["attn.o_norm.weight"] = (D,)
        block |= {"mlp.c_fc1.weight": (hidden, d), "mlp.c_fc2.weight": (hidden, d), "mlp.c_proj.weight": (d, hidden)}
        block |= {"ln_1.weight": (d,), "ln_2.weight": (d,)}
        if variant != "baseline":
            for sublayer in ("ddl_attn", "ddl_mlp"):
                gate = {"beta.weight": (1, d), "beta.bias": (1,)}
                if not o["ddl_beta_single_linear"]:
                    G = o["ddl_beta_hidden_size"]
                    gate = {"beta_in.weight": (G, d), "beta_out.weight": (1, G), "beta_out.bias": (1,)}
                gate |= {"v_proj.weight": (V, d), "v_proj.bias": (V,)}
                block |= {f"{sublayer}.{name}": shape for name, shape in gate.items()}
        found |= {f"transformer.h.{n}.{name}": shape for name, shape in block.items()}
    return found


def random_tensors(variant, options, seed=0):
    """Generic tensors: gains and biases as different from their start as the rest."""
    rng = np.random.default_rng(seed)

    def draw(shape):
        return rng.standard_normal(shape) * 0.3 + (0.5 if len(shape) == 1 else 0.0)

    return {name: draw(shape).astype(np.float32) for name, shape in shapes(variant, options).items()}


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
    kernel = p["input_embed.conv.weight"].reshape(d, channels, -1)
    state, taps = np.zeros((batch, tokens, d, channels)), kernel.shape[-1]
    for t in range(tokens):
        for tap in range(taps):
            source = t - (taps - 1 - tap)
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
            for tap in range(channels):
                source = u + tap - (channels - 1) // 2
                if 0 <= source < channels:
                    mixed[..., u] += p["weight"][:, tap] * state[..., source]
    else:
        kernel = p["shortconv.weight"].reshape(d, channels, -1)
        taps = kernel.shape[-1]
        for t in range(tokens):
            for tap in range(taps):
                source = t - (taps - 1 - tap)
                if source >= 0:
                    mixed[:, t] += kernel[:, :, tap] * state[:, source]
    return mixed @ p["read"]


def part(tensors, prefix):
    """The tensors under a prefix, in float64, without it."""
    return {name[len(prefix) :]: np.asarray(a, np.float64) for name, a in tensors.items() if name.startswith(prefix)}


def value(o, constant, logit):
    if o[f"ddl_v_{constant}"]:
        return o[f"ddl_v_{constant}_value"]
    return o["ddl_v_sigmoid_scale"] * sigmoid(logit) if o["ddl_v_sigmoid"] else logit


def forward(tensors, tokens, variant, options):
    """Logits, and the intermediate arrays under the names the golden files use."""
    o = DEFAULTS | options
    head_dim, layers = o["head_dim"], o["num_hidden_layers"]
    everything = part(tensors, "")
    embedding = everything["transformer.wte.weight"]
    plain = variant == "baseline"
    channels = o["ddl_value_channels"] if variant[0] in "ct" else 1
    constant = "dim1_constant" if variant == "vdim1" else "constant"
    scale = o["hidden_size_base"] / o["hidden_size"] if o["mup"] else 1.0
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
                k = h / np.sqrt(np.sum(h * h, axis=-1, keepdims=True) + o["ddl_k_eps"] ** 2)
                β, v = 2 * sigmoid(logit), value(o, constant, record["v_logit"])
                readout = np.einsum("btd,btdv->btv", k, state)
                state = state + k[..., None] * (β * (v - readout))[:, :, None]
            seen |= {f"upd/{2 * n + i}/{name}": array for name, array in record.items()}
            seen[f"upd/{2 * n + i}/x_out"] = state
    seen["out/readout"] = compress(part(tensors, "readout."), state)
    seen["out/final"] = rms_norm(seen["out/readout"], everything["ln_f.weight"])
    return scale * seen["out/final"] @ embedding.T, seen
