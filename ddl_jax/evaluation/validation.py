"""Validation loss over fixed batches."""

from collections.abc import Callable, Iterable
import math
import sys
from typing import NamedTuple

import numpy as np

from ddl_jax.data import NO_TARGET


class Validation(NamedTuple):
    """Attributes: `loss` in nats per token, `bits_per_byte` of UTF-8 text, and how many `tokens` were predicted."""

    loss: float
    bits_per_byte: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """e to the loss; infinite where no float is as large."""
        return math.exp(self.loss) if self.loss < math.log(sys.float_info.max) else math.inf


def validate(total_nats: Callable, batches: Iterable, byte_lengths: np.ndarray) -> Validation:
    """The mean negative log-likelihood of the batches' counted targets.

    Args:
        total_nats: batch → sum of nats over its counted targets.
        batches: with `tokens` and `targets`, (sequences, tokens) each; a target of −1 does not count.
        byte_lengths: (vocabulary,) how many bytes of text each token stands for.
    """
    nats, tokens, size = 0.0, 0, 0
    for batch in batches:
        nats += float(total_nats(batch))
        targets = batch.targets[batch.targets != NO_TARGET]
        tokens += targets.size
        size += int(byte_lengths[targets].sum())
    return Validation(nats / tokens, nats / math.log(2) / size, tokens)


def padded_byte_lengths(byte_lengths: np.ndarray, vocab_size: int) -> np.ndarray:
    """A tokenizer's byte lengths, for a model's larger vocabulary: what no token stands for has none."""
    return np.pad(byte_lengths.astype(np.int64), (0, vocab_size - len(byte_lengths)))
