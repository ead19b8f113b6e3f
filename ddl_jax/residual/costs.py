"""What a residual stream costs, by formula."""

from typing import NamedTuple

from ddl_jax.config import ResidualConfig
from ddl_jax.config.residual import HYPER


class Costs(NamedTuple):
    """Of one forward pass, for one token."""

    flops: int  # a multiply-add counts as two
    elements: int  # of the state, the branch and the reads moved to and from memory, each operation in one pass


def stream_costs(config: ResidualConfig, width: int, sublayers: int) -> Costs:
    """The costs of expansion, readers and updates over all sublayers (design 3.2 for the elements moved).

    A delta update: ‖h‖² and k (3d), kᵀX (2Vd), X + β k wᵀ (2Vd), gate and value (2d and 2Vd without hidden layer).
    """
    config = config.resolve(width)
    V, d = config.value_channels, width
    if config.kind in HYPER:
        return _mixing_costs(config, d, sublayers)
    expand = 2 * config.expansion_taps * V * d if config.expansion == "convolution" else 0
    read = {"identity": 0, "channel": 2 * V * d, "token": 2 * (config.reader_taps or 0) * V * d}[config.reader]
    if config.kind in ("additive", "additive_expanded"):
        update = V * d
    else:
        hidden = config.gate.hidden
        gate = 2 * d * hidden + 2 * hidden if hidden else 2 * d
        value = 0 if config.value.constant is not None else 2 * V * d
        direction = {"sublayer": 0, "mlp": 4, "attention": 8}[config.direction] * d * (config.direction_width or 0)
        update = 3 * d + 2 * V * d * (2 if config.kind == "delta" else 1) + gate + value + direction
    reads = sublayers + 1
    flops = expand + reads * read + sublayers * update
    # The rewrite moves X, h and X'; fused with a channel read, x as well; a read on its own moves X and x.
    fused = config.reader == "channel"
    write = (2 * V + 1) * d + (d if fused else 0)
    alone = 0 if config.reader == "identity" else (V + 1) * d
    elements = (V + 1) * d + sublayers * write + (1 if fused else reads) * alone
    return Costs(flops, elements)


def _mixing_costs(config: ResidualConfig, d: int, sublayers: int) -> Costs:
    """Of streams that are mixed: m_pre H (2Vd), M_res H (2V²d) and m_post h (2Vd), and what makes these coefficients.

    The squares in a norm (2Vd) in reader and update, and a product of the state with one column for each coefficient:
    of each stream by itself (hyper-connections, where they are dynamic), or of all as one vector (mHC). What is done to
    the coefficients themselves is left out; Sinkhorn's rounds are below a per cent from a width of 256 on.
    """
    V = config.value_channels
    columns = {"hyper_connections": 2 + V if config.dynamic else 0, "mhc": 2 * V + V * V}[config.kind]
    made = 4 * V * d + 2 * V * d * columns if columns else 0
    flops = sublayers * (made + 4 * V * d + 2 * V * V * d) + (V - 1) * d  # the final read is a sum
    return Costs(flops, (V + 1) * d + sublayers * (2 * V + 1) * d + (sublayers + 1) * (V + 1) * d)
