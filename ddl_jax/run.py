"""A trained run, for use: its model, its tokenizer and its configuration, on one device of this machine."""

import dataclasses
import os
from pathlib import Path
import sys
from typing import NamedTuple

from flax import nnx
import jax
from jax.sharding import SingleDeviceSharding

from ddl_jax.config import Config, TransformerConfig
from ddl_jax.data import Tokenizer, load_tokenizer
from ddl_jax.errors import InputError
from ddl_jax.training.checkpoint import read_parameters
from ddl_jax.training.run_directory import recorded_config
from ddl_jax.transformer import Transformer, auto


class Run(NamedTuple):
    """Attributes: `model`, `tokenizer`, and `config`, that of the training but for how `model` computes here."""

    model: Transformer
    tokenizer: Tokenizer
    config: Config


def load_run(directory: str | os.PathLike) -> Run:
    """The model of a run with the parameters of its newest checkpoint, its tokenizer and its configuration.

    The model is on one device of this machine, wherever it was trained; parameters are float32. Nothing is written to
    the folder, in which a process may be training.

    Args:
        directory: of the run.

    Raises:
        InputError: there is no such folder, it holds no run or no checkpoint yet, or what it holds is damaged.
    """
    return load_checkpoint(directory)[0]


def load_checkpoint(directory: str | os.PathLike) -> tuple[Run, int]:
    """What `load_run` gives, and the step of the checkpoint that was read; arguments and errors as there."""
    path = Path(directory).expanduser()
    shown = f"run_dir {str(directory)!r}"
    if not path.is_dir():
        raise InputError(f"{shown} is not a folder; name the run_dir of a run")
    if not (path / "config.yaml").is_file():
        raise InputError(f"{shown} holds no config.yaml, so no run; name the run_dir of one")
    device = jax.local_devices()[0]
    config = recorded_config(path, shown)
    if config.model.vocab_size is None:
        raise InputError(f"{shown}: config.yaml has no model.vocab_size; restore it, or use another run_dir")
    model = auto.decided(_wherever(config.model, device), [device])
    config = dataclasses.replace(config, run_dir=str(directory), model=model)
    tokenizer = load_tokenizer(config.data, path)
    graph, parameters = nnx.split(nnx.eval_shape(lambda: Transformer(model, rngs=nnx.Rngs(0))))
    here = SingleDeviceSharding(device)
    parameters = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), parameters)
    step, parameters = read_parameters(path / "checkpoints", parameters, lambda line: print(line, file=sys.stderr))
    return Run(nnx.merge(graph, parameters), tokenizer, config), step


def _wherever(config: TransformerConfig, device: jax.Device) -> TransformerConfig:
    """The configuration with what another kind of device decided, or would refuse, open again.

    A run records what `auto` came to where it was trained, so that bfloat16 may have been nobody's choice; where there
    is no GPU it is slow, and float32 holds all that it does.
    """
    residual = config.residual
    if residual.kernel == "pallas":
        residual = dataclasses.replace(residual, kernel="auto")
    attention = "auto" if config.attention == "cudnn" else config.attention
    config = dataclasses.replace(config, residual=residual, attention=attention)
    if device.platform == "gpu":
        return config
    return dataclasses.replace(config, compute_dtype="float32", state_dtype="float32")
