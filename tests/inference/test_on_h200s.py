"""What the making of tokens becomes on H200s, compiled without one."""

import re

from flax import nnx
import jax
import jax.numpy as jnp
import pytest

from ddl_jax.config import Config, ResidualConfig, TransformerConfig
from ddl_jax.inference import decode
from ddl_jax.plan.program import devices_for
from ddl_jax.plan.sizes import cache_bytes
from ddl_jax.training.step import init_state, model_graph
from pallas_kernels import hopper
from tests.h200 import needs_compiler

BATCH, CONTEXT = 3, 256


@needs_compiler
@pytest.mark.parametrize("reader, kernels", [("channel", 4), ("token", 4 + 5)])  # 4 writes; TC: 5 reads of their own
def test_a_step_is_our_kernels_and_changes_its_caches_in_place(reader, kernels):
    model = TransformerConfig(
        layers=2, width=128, heads=2, vocab_size=64, context_length=CONTEXT, compute_dtype="bfloat16",
        state_dtype="bfloat16", residual=ResidualConfig(value_channels=2, reader=reader),
    )  # fmt: skip
    config = Config(model=model).resolve()
    parameters = jax.eval_shape(lambda: init_state(config)).parameters
    model = nnx.merge(model_graph(config, devices_for(1)), parameters)
    tokens = jax.ShapeDtypeStruct((BATCH, 8), jnp.int32)
    _, past = jax.eval_shape(lambda *args: decode.prefill(*args, None, slots=CONTEXT), model, tokens)
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
        (jax.eval_shape(decode.decoder, model), jax.ShapeDtypeStruct((BATCH,), jnp.int32), past),
    )
    compiled = hopper.compile_for(jax.jit(decode.step, donate_argnums=2), *arguments)
    assert len(re.findall('custom_call_target="mosaic', compiled.as_text())) == kernels
    # A copy of the keys and values would take as long as attending to them.
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(cache_bytes(config.model, BATCH).values())
