"""Validation loss per counted token, and bits per byte of text."""

import math
from typing import NamedTuple

import numpy as np

from ddl_jax.evaluation import Validation, validate


class Batch(NamedTuple):
    tokens: np.ndarray
    targets: np.ndarray


def test_means_over_counted_targets_and_bytes():
    batches = [
        Batch(np.zeros((1, 3), int), np.array([[0, 1, 2]])),
        Batch(np.zeros((1, 3), int), np.array([[2, -1, -1]])),
    ]
    byte_lengths = np.array([1, 3, 0])  # the last is a separator: no text
    nats = {id(batches[0]): 6.0, id(batches[1]): 4.0}
    result = validate(lambda batch: nats[id(batch)], batches, byte_lengths)
    assert result.loss == 10.0 / 4
    assert result.bits_per_byte == 10.0 / math.log(2) / 4


def test_of_a_uniform_model_over_bytes_it_is_eight_bits():
    targets = np.arange(256).reshape(1, -1)
    result = validate(lambda batch: 256 * math.log(256), [Batch(targets, targets)], np.ones(256, int))
    np.testing.assert_allclose([result.loss, result.bits_per_byte], [math.log(256), 8.0])


def test_the_perplexity_of_a_very_bad_model_is_infinite():
    assert Validation(2.0, 1.0, 1).perplexity == math.exp(2.0)
    assert Validation(1e3, 1.0, 1).perplexity == math.inf
