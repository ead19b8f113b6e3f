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
    watch = clock.Clock(config(), step=10)
    time[0] += 2
    with watch.paused():
        time[0] += 6
    lap = watch.lap(15)
    assert lap == {"seconds": 8, "tokens_per_second": 5 * 8 * 16 / 2}
    time[0] += 1
    assert watch.lap(16) == {"seconds": 1, "tokens_per_second": 8 * 16}


def test_mfu_only_where_the_peak_is_known(time, monkeypatch):
    class H200:
        device_kind = "NVIDIA H200"

    monkeypatch.setattr(clock.jax, "devices", lambda: [H200()])
    monkeypatch.setattr(clock.jax, "device_count", lambda: 1)
    watch = clock.Clock(config(), step=0)
    time[0] += 1
    lap = watch.lap(4)
    assert lap["mfu"] == lap["tokens_per_second"] * flops_per_token(config().model) / 989e12


def test_durations_read_as_people_say_them():
    assert [duration(s) for s in (0.2, 59.4, 60, 200, 3600, 18720)] == [
        "0 s", "59 s", "1 min 0 s", "3 min 20 s", "1 h 0 min", "5 h 12 min",
    ]  # fmt: skip
