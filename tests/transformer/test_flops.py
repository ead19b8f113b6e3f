"""FLOPs per token of a training step, counted by hand."""

import dataclasses

from ddl_jax.config import ResidualConfig, TransformerConfig
from ddl_jax.transformer.costs import flops_per_token


def test_of_the_plain_model_by_hand():
    config = TransformerConfig(
        layers=2,
        width=12,
        heads=2,
        head_dim=4,
        context_length=10,
        vocab_size=50,
        residual=ResidualConfig(kind="additive"),
    )
    layer = 2 * (4 * 12 * 8 + 3 * 12 * 32) + 2 * 10 * 8  # projections, SwiGLU with floor(8·12/3) = 32; half the context
    head, additions = 2 * 50 * 12, 4 * 12
    assert flops_per_token(config) == 3 * (2 * layer + head + additions)
    gated = dataclasses.replace(config, output_gate=True)  # one projection more in each of two layers
    assert flops_per_token(gated) == flops_per_token(config) + 3 * 2 * 2 * 12 * 8


def test_small_is_six_times_its_matrix_parameters_and_attention():
    config = TransformerConfig(
        layers=12, width=768, heads=6, head_dim=128, context_length=1024, vocab_size=50304,
        residual=ResidualConfig(kind="additive"),
    )  # fmt: skip
    matrices = 123_590_400 - 25 * 768 - 12 * 2 * 128  # all parameters of the baseline but the gains
    attention = 6 * 12 * 1024 * 768
    assert abs(flops_per_token(config) / (6 * matrices + attention) - 1) < 1e-4
