"""An official model as a run directory of ours, at step 0 of a training that has no data yet."""

from collections.abc import Callable
import os
from pathlib import Path
import shutil

from flax import nnx
import jax.numpy as jnp

from ddl_jax.config import Config, DataConfig
from ddl_jax.config.files import dump_config
from ddl_jax.data import make_tokenizer
from ddl_jax.training.checkpoint import Checkpoints
from ddl_jax.training.optimizer import make_optimizer
from ddl_jax.training.step import TrainState
from ddl_jax.transformer import Transformer

GPT2 = 50257  # tokens of GPT-2's vocabulary


def default_tokenizer(vocab_size: int) -> str:
    """The official models' tokenizer is GPT-2's; a smaller vocabulary than its is one for tests."""
    return "gpt2" if vocab_size >= GPT2 else "bytes"


def write_run(directory: Path, model: Transformer, tokenizer: str, say: Callable[[str], None]) -> None:
    """Writes a run directory that is there whole or not at all.

    Args:
        directory: not there yet, or empty.
        model: with its configuration.
        tokenizer: as `data.tokenizer`, not `bpe`.
        say: called with a line of text where something is worth telling.

    Raises:
        InputError: the tokenizer cannot be used.
        RunError: the checkpoint cannot be written.
        OSError: something else cannot.
    """
    config = Config(run_dir=str(directory), model=model.config, data=DataConfig(tokenizer=tokenizer)).resolve()
    parents = [folder for folder in directory.absolute().parents if not folder.exists()]
    partial = directory.absolute().with_name(f"{directory.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        size = make_tokenizer(config.data, [], partial).vocab_size
        if size > config.model.vocab_size:
            say(
                f"The vocabulary, {config.model.vocab_size}, is smaller than that of tokenizer {tokenizer!r}, {size}: "
                "the model is for tokens, not for text"
            )
        parameters = nnx.state(model, nnx.Param)
        optimizer = make_optimizer(config.optimizer, config.training.steps).init(parameters)
        with Checkpoints(partial / "checkpoints", say) as checkpoints:
            checkpoints.save(0, TrainState(jnp.int32(0), parameters, optimizer))
            checkpoints.wait()
        (partial / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        os.rename(partial, directory.absolute())
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        for folder in parents:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        raise
