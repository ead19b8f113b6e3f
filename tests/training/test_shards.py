"""A run over token shards: what it says and records of them, and that it resumes over these alone."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from ddl_jax.config import Config, ResidualConfig, TransformerConfig
from ddl_jax.data import prepare
from ddl_jax.errors import InputError
from ddl_jax.training import train
from ddl_jax.training.run_directory import RunDirectory
from tests.training.runs import metrics, tiny_config


def write_shard(path: Path, tokens: np.ndarray) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())


def test_a_run_over_shards_resumes_and_refuses_others(tmp_path, capsys):
    tokens = np.arange(600) % 7  # that a model of any size learns
    write_shard(tmp_path / "t_train_1.bin", tokens)
    write_shard(tmp_path / "t_val_0.bin", tokens[:100])
    config = tiny_config(tmp_path, steps=12)
    data = dataclasses.replace(config.data, corpus="shards", paths=(str(tmp_path / "*.bin"),))
    model = TransformerConfig(layers=1, width=8, heads=2, context_length=16, residual=ResidualConfig(kind="additive"))
    config = dataclasses.replace(config, data=data, model=model).resolve()
    assert train(config) == 0
    assert "600 tokens in 1 shards, 100 tokens in 1 held out" in capsys.readouterr().out
    assert metrics(config)[-1]["validation_loss"] < metrics(config)[0]["loss"]
    recorded = json.loads((Path(config.run_dir) / "data.json").read_text())
    assert (recorded["train_tokens"], recorded["validation_shards"], recorded["tokenizer"]) == (600, 1, "bytes")
    assert "text_sha256" not in recorded

    begin(config)
    tokens[-1] += 1
    write_shard(tmp_path / "t_train_1.bin", tokens)
    with pytest.raises(InputError, match="another shards_fingerprint"):
        begin(config)


def begin(config: Config) -> None:
    """What a run does before its first step, resumed or not."""
    with RunDirectory(config) as run:
        run.begin(run.settle(config), prepare(config.data, config.model.context_length, run.path))
