"""The largest micro-batch that fits: a line through two compilations, and what a third says about it."""

import dataclasses
import types

import pytest

from ddl_jax.config import Config, TrainingConfig
from ddl_jax.plan.memory import by_kind, fit, line_by_formula, with_microbatch
from pallas_kernels.h200 import MEMORY

GB = 10**9


def config(micro: int = 8, batch: int = 24) -> Config:
    return Config(training=TrainingConfig(batch_size=batch, microbatch_size=micro))


def compiler(peak):
    """Stands for compilations: steps with the peak memory that `peak(micro-batch)` says; keeps which were asked for."""
    asked = []

    def compiled(config):
        size = config.training.microbatch_size
        asked.append((size, config.training.batch_size))
        return types.SimpleNamespace(peak_bytes=peak(size))

    return compiled, asked


def test_a_straight_line_is_found_and_checked():
    compiled, asked = compiler(lambda size: 5 * GB + 2 * GB * size)
    found = fit(config(), compiled)
    assert found.largest == (MEMORY - 5 * GB) // (2 * GB) == 68
    assert found.predicted == 5 * GB + 68 * 2 * GB
    assert found.peaks == ((4, 13 * GB), (8, 21 * GB), (68, 141 * GB))
    # As many micro-batches in a batch as before; each compiled once.
    assert sorted(asked) == [(4, 12), (8, 24), (68, 204)]


def test_a_micro_batch_of_one_is_compared_with_two():
    compiled, asked = compiler(lambda size: 10 * GB * size)
    assert fit(config(1), compiled).largest == 14
    assert {size for size, _ in asked} == {1, 2, 14}


def test_what_does_not_fit_after_all_is_mended():
    """Above 20 sequences memory grows faster than the line says."""
    compiled, _ = compiler(lambda size: 5 * GB + 2 * GB * size + 2 * GB * max(0, size - 20))
    found = fit(config(), compiled)
    peaks = dict(found.peaks)
    assert peaks[found.largest] <= MEMORY
    assert found.largest == 44  # 5 + 88 + 48 = 141
    assert found.predicted == 5 * GB + 44 * 2 * GB


def test_nothing_fits():
    compiled, _ = compiler(lambda size: 150 * GB + GB * size)
    found = fit(config(), compiled)
    assert (found.largest, found.predicted) == (0, None)


def test_by_formula_from_one_compilation():
    # 1 GB of parameters, as much of gradients, 2 GB of optimiser state: 17 GB are of 8 sequences.
    step = types.SimpleNamespace(peak_bytes=21 * GB, parameter_bytes=GB, optimizer_bytes=2 * GB, saved_bytes=13 * GB)
    line = line_by_formula(config(), step)
    assert line == (4 * GB, 17 * GB / 8)
    assert line.largest() == int(137 / (17 / 8))
    assert by_kind(step) == {"parameters": GB, "optimizer": 2 * GB, "saved": 13 * GB, "rest": 5 * GB}
    step.saved_bytes = 0  # no loop over layers
    assert by_kind(step) == {"parameters": GB, "optimizer": 2 * GB, "saved": None, "rest": 18 * GB}


@pytest.mark.parametrize("size, batch", [(8, 24), (5, 15)])
def test_another_micro_batch_keeps_their_number(size, batch):
    training = with_microbatch(config(), size).training
    assert (training.microbatch_size, training.batch_size) == (size, batch)
    assert dataclasses.replace(training, microbatch_size=8, batch_size=24) == config().training
