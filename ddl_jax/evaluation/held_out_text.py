"""The validation loss of a run on the text that its training has never seen."""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from ddl_jax.config import Config
from ddl_jax.data import NO_TARGET, Windows, held_out, prepare
from ddl_jax.data.windows import Tokens
from ddl_jax.errors import InputError
from ddl_jax.evaluation.devices import Placed, on_all_devices
from ddl_jax.evaluation.progress import Counted
from ddl_jax.evaluation.validation import Validation, padded_byte_lengths, validate
from ddl_jax.run import Run
from ddl_jax.training.run_directory import RunFolder
from ddl_jax.training.sharding import place_batch
from ddl_jax.training.step import Batch, make_evaluation_step


def held_out_tokens(config: Config, paths: tuple[str, ...] | None = None) -> Tokens:
    """The held-out tokens of a run.

    Args:
        config: as loaded.
        paths: where the text is now, if it is no longer where `data.paths` says.

    Raises:
        InputError: the text is not there, or is not the text of the run; or it is a converted model,
            which has none.
    """
    data = config.data if paths is None else dataclasses.replace(config.data, paths=paths).resolve()
    config = dataclasses.replace(config, data=data)
    folder = RunFolder(config)
    if folder.converted:
        raise InputError(
            f"run_dir {config.run_dir!r} was converted and has not been trained here: it holds out no text; "
            "--no-validation goes without"
        )
    try:
        corpus = prepare(data, config.model.context_length, Path(folder.path))
        folder.begin(config, corpus)
    except InputError as error:
        where = "; --data.paths says where the text is now" if data.paths else ""
        raise InputError(f"{error}{where}; --no-validation goes without it") from None
    return corpus.validation


def validate_run(
    run: Run, *, placed: Placed | None = None, tokens: Tokens | None = None, batches: int | None = None
) -> Validation:
    """The loss of a run on its held-out text, in windows of `model.context_length` tokens.

    Args:
        run: as loaded.
        placed: the same on all devices.
        tokens: of `held_out_tokens`.
        batches: windows of so many batches of the training, those that the training evaluates on; by default all.

    Raises:
        InputError: as `held_out_tokens`.
    """
    tokens = held_out_tokens(run.config) if tokens is None else tokens
    placed = on_all_devices(run) if placed is None else placed
    config, length = placed.config, run.config.model.context_length
    step = jax.jit(make_evaluation_step(placed.graph, config, placed.mesh))
    most = len(Windows(tokens, length))
    most = most if batches is None else min(most, batches * run.config.training.batch_size)
    byte_lengths = padded_byte_lengths(run.tokenizer.byte_lengths, config.model.vocab_size)
    with Counted("validation, windows", most) as progress:

        def nats(batch: Batch) -> float:
            found = float(step(placed.parameters, place_batch(batch, placed.mesh)))
            progress.advance(int(np.sum(batch.targets[:, 0] != NO_TARGET)))
            return found

        found = (Batch(**batch) for batch in held_out(tokens, length, config.training.batch_size, most))
        return validate(nats, found, byte_lengths)
