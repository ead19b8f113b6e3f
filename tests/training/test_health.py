"""Numbers that are no longer finite: noticed at the right step, with a cause that fits what came before."""

import pytest

from ddl_jax.errors import Diverged
from ddl_jax.training.health import Health

GOOD = {"loss": 3.0, "grad_norm": 1.0, "parameter_norm": 9.0, "learning_rate": 1e-3}


def watched(*steps: dict) -> str:
    """The message after these steps."""
    health = Health(kept=lambda: "kept")
    with pytest.raises(Diverged) as caught:
        for step, metrics in enumerate(steps, 1):
            health.observe(step, metrics)
        health.settle()
    return str(caught.value)


def test_a_step_is_checked_when_the_next_one_has_begun():
    health = Health(kept=lambda: "kept")
    health.observe(1, GOOD | {"loss": float("nan")})
    with pytest.raises(Diverged, match="^step 1: loss is nan; likely cause: .*; kept$"):
        health.observe(2, GOOD)


def test_good_steps_pass():
    health = Health(kept=lambda: "kept")
    for step in range(100):
        health.observe(step, GOOD)
    health.settle()
    health.settle()


@pytest.mark.parametrize("name", ["loss", "grad_norm", "parameter_norm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_every_number_counts(name, value):
    message = watched(GOOD, GOOD | {name: value})
    assert message.startswith(f"step 2: {name} is {value}") and "\n" not in message


def test_causes():
    nan = GOOD | {"loss": float("nan")}
    assert "very first update" in watched(nan)
    assert "gradient norm rose from a median of 1 to 50" in watched(*[GOOD] * 9, GOOD | {"grad_norm": 50.0}, nan)
    assert "overflow in the backward pass" in watched(*[GOOD] * 9, GOOD | {"grad_norm": float("inf")})
    assert "steady at 1" in watched(*[GOOD] * 9, nan)
    assert "optimizer.learning_rate (now 1.00e-03" in watched(*[GOOD] * 9, nan)
