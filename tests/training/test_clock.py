"""Seconds are all the time that passed; speed counts training alone."""

import dataclasses

import pytest

from ddl_jax.config import Config, TransformerConfig
from ddl_jax.training import clock
from ddl_jax.training.display import duration
from ddl_jax.transformer.costs import flops_per_token


@pytest.fixture
def time(monkeypatch):
    """A clock that the test sets."""
    now = [100.0]
    monkeypatch.setattr(clock.time, "monotonic", lambda: now[0])
    return now


def config() -> Config:
    model = TransformerConfig(layers=1, width=8, context_length=16, vocab_size=64)
    return dataclasses.replace(Config(), model=model).resolve()


def test_pauses_count_as_seconds_but_not_against_speed(time):
    watch = clock.Clock(config(), 10, [Unknown()])
    time[0] += 2
    with watch.paused():
        time[0] += 6
    lap = watch.lap(15)
    assert lap == {"seconds": 8, "tokens_per_second": 5 * 8 * 16 / 2}
    time[0] += 1
    assert watch.lap(16) == {"seconds": 1, "tokens_per_second": 8 * 16}


class H200:
    device_kind = "NVIDIA H200"


class Unknown:
    device_kind = "cpu"


def test_mfu_counts_the_devices_in_use_and_only_known_peaks(time):
    def lap(dtype, devices):
        bf16 = dataclasses.replace(config(), model=dataclasses.replace(config().model, compute_dtype=dtype))
        watch = clock.Clock(bf16, 0, devices)
        time[0] += 1
        return watch.lap(4)

    for count in (1, 4):
        known = lap("bfloat16", [H200()] * count)
        assert known["mfu"] == known["tokens_per_second"] * flops_per_token(config().model) / (989e12 * count)
    for dtype, devices in (("float32", [H200()]), ("bfloat16", [Unknown()]), ("bfloat16", [H200(), Unknown()])):
        assert "mfu" not in lap(dtype, devices)


def test_durations_read_as_people_say_them():
    assert [duration(s) for s in (0.2, 59.4, 60, 200, 3600, 18720)] == [
        "0 s", "59 s", "1 min 0 s", "3 min 20 s", "1 h 0 min", "5 h 12 min",
    ]  # fmt: skip
