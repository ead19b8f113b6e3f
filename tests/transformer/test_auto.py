"""What the `auto` settings of a model come to on given devices."""

import dataclasses
import re
import types

import pytest

from ddl_jax.config import TransformerConfig
from ddl_jax.errors import InputError
from ddl_jax.transformer.auto import decided, explain_attention, with_dtypes


def device(platform, kind, capability=None):
    return types.SimpleNamespace(platform=platform, device_kind=kind, compute_capability=capability)


CPU = device("cpu", "cpu")
H200, A100 = device("gpu", "NVIDIA H200", "9.0"), device("gpu", "NVIDIA A100", "8.0")
V100, MI300 = device("gpu", "NVIDIA V100", "7.0"), device("gpu", "AMD Instinct MI300X", "gfx942")


def config(**changes):
    return dataclasses.replace(TransformerConfig().resolve(), **changes)


@pytest.mark.parametrize("changes, where, expected", [
    ({}, CPU, "XLA: no GPU here"),
    ({}, H200, "cuDNN"),
    ({}, A100, "cuDNN"),
    ({"attention": "cudnn"}, H200, "cuDNN"),
    ({"attention": "xla"}, H200, "XLA"),
    ({}, V100, "XLA: NVIDIA V100 is older than cuDNN's flash attention"),
    ({}, MI300, "XLA: AMD Instinct MI300X is not a GPU of NVIDIA's"),
    ({"compute_dtype": "float32"}, H200, "XLA: cuDNN's flash attention takes bfloat16, not float32"),
    ({"head_dim": 256}, H200, "cuDNN"),
    ({"head_dim": 256}, A100, "XLA: head_dim 256 is not a multiple of 8 up to 128"),
    ({"head_dim": 36}, H200, "XLA: head_dim 36 is not a multiple of 8 up to 256"),
], ids=str)  # fmt: skip
def test_which_attention_runs_is_said_with_the_reason(changes, where, expected):
    model = with_dtypes(config(**changes), [where])
    assert explain_attention(model, [where]) == expected
    assert decided(model, [where]).attention == ("cudnn" if expected == "cuDNN" else "xla")


@pytest.mark.parametrize("where, reason", [
    (CPU, "no GPU here"), (A100, "head_dim 160 is not a multiple of 8 up to 128"),
], ids=["CPU", "A100"])  # fmt: skip
def test_cudnn_where_it_cannot_run_is_refused_in_one_line(where, reason):
    message = f"^model.attention 'cudnn' cannot run: {re.escape(reason)}; use 'auto'$"
    with pytest.raises(InputError, match=message):
        decided(config(attention="cudnn", head_dim=160), [where])


@pytest.mark.parametrize("where, dtype", [(CPU, "float32"), (H200, "bfloat16")], ids=["CPU", "H200"])
def test_dtypes_follow_the_devices_unless_given(where, dtype):
    assert decided(config(), [where]).compute_dtype == decided(config(), [where]).state_dtype == dtype
    given = decided(config(compute_dtype="float32", state_dtype="bfloat16"), [where])
    assert (given.compute_dtype, given.state_dtype) == ("float32", "bfloat16")
