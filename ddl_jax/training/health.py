"""Notices a loss or gradient that is no longer finite, one step late so that the device never waits for the host."""

import collections
import math

from ddl_jax.errors import Diverged


class Health:
    """Watches the metrics of every step.

    Args:
        kept: says what remains, for the message: "the last good checkpoint is step 40".
    """

    def __init__(self, kept):
        self._kept = kept
        self._waiting = None
        self._recent = collections.deque(maxlen=20)  # gradient norms of the last good steps

    def observe(self, step: int, metrics: dict) -> None:
        """Takes the metrics of a step that may still be running, and checks those of the step before it."""
        before, self._waiting = self._waiting, (step, metrics)
        if before is not None:
            self._check(*before)

    def settle(self) -> None:
        """Checks what has been observed last; afterwards the state is known to be good."""
        before, self._waiting = self._waiting, None
        if before is not None:
            self._check(*before)

    def _check(self, step: int, metrics: dict) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        if all(map(math.isfinite, values.values())):
            self._recent.append(values["grad_norm"])
            return
        raise Diverged(f"step {step}: {_broken(values)}; likely cause: {self._cause(step, values)}; {self._kept()}")

    def check_validation(self, step: int, loss: float, learning_rate: float) -> None:
        """Raises Diverged where the parameters after `step` give a validation loss that is not finite."""
        if not math.isfinite(loss):
            values = {"loss": loss, "grad_norm": 0.0, "learning_rate": learning_rate}
            cause = self._cause(step, values)
            raise Diverged(f"step {step}: the validation loss is {loss}; likely cause: {cause}; {self._kept()}")

    def _cause(self, step: int, values: dict) -> str:
        rate = values["learning_rate"]
        slower = (
            f"lower optimizer.learning_rate (now {rate:.2e} in the schedule) or more optimizer.warmup_steps, "
            "in another run_dir"
        )
        if step == 1:
            return f"the very first update; the data or the initial parameters are not finite, or try {slower}"
        if not self._recent:
            return f"the state that was resumed; try {slower}"
        typical = sorted(self._recent)[len(self._recent) // 2]
        if self._recent[-1] > 3 * typical:
            last = self._recent[-1]
            return (
                f"too large steps (the gradient norm rose from a median of {typical:.2g} to {last:.2g}); try {slower}"
            )
        if math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"]):
            return f"one step too large (the gradient was finite, the parameters overflowed); try {slower}"
        if math.isfinite(values["loss"]):
            return f"an overflow in the backward pass (the loss is still finite); try {slower}"
        return f"one step too large (the gradient norm was steady at {typical:.2g}); try {slower}"


def _broken(values: dict) -> str:
    names = [name for name, value in values.items() if not math.isfinite(value)]
    return ", ".join(f"{name} is {values[name]}" for name in names)
