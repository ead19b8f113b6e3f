"""Validation loss over fixed batches."""

from collections.abc import Callable, Sequence
import math
from typing import NamedTuple

import numpy as np

from ddl_jax.data import NO_TARGET


class Validation(NamedTuple):
    """Attributes: `loss` in nats per token, `bits_per_byte` of UTF-8 text."""

    loss: float
    bits_per_byte: float


def validate(total_nats: Callable, batches: Sequence, byte_lengths: np.ndarray) -> Validation:
    """The mean negative log-likelihood of the batches' counted targets.

    Args:
        total_nats: batch → sum of nats over its counted targets.
        batches: with `tokens` and `targets`, (sequences, tokens) each; a target of −1 does not count.
        byte_lengths: (vocabulary,) how many bytes of text each token stands for.
    """
    nats = sum(float(total_nats(batch)) for batch in batches)
    targets = np.concatenate([batch.targets.ravel() for batch in batches])
    targets = targets[targets != NO_TARGET]
    return Validation(nats / targets.size, nats / math.log(2) / int(byte_lengths[targets].sum()))
