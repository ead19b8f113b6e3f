"""The settings of the optimiser and of the training loop."""

import dataclasses

from ddl_jax.config.rules import filled, require, require_between, require_least, require_types
from ddl_jax.errors import nearest_divisors, nearest_multiples


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW after clipping by global norm; linear warm-up, then cosine.

    Attributes:
        learning_rate: peak.
        warmup_steps: steps from 0 to the peak.
        final_fraction: what the learning rate has come down to after the last step, as a share of the peak.
        weight_decay: on weights, never on gains and biases.
        betas: AdamW's two decay rates.
        clip_norm: largest global norm of the gradient.
    """

    learning_rate: float = 1e-3
    warmup_steps: int = 100
    final_fraction: float = 0.1
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0

    def validate(self, steps: int, path: str = "optimizer") -> None:
        """Raises InputError on a broken rule."""
        require_types(self, path)
        require(self, path, "learning_rate", self.learning_rate > 0, "must be positive", "typical: 1e-3")
        warmup = 0 <= self.warmup_steps < steps
        nearest = f"nearest: {min(max(self.warmup_steps, 0), steps - 1)}"
        require(self, path, "warmup_steps", warmup, f"must lie in [0, training.steps), which is {steps}", nearest)
        require_between(self, path, "final_fraction", 0.0, 1.0)
        require(self, path, "weight_decay", self.weight_decay >= 0, "must not be negative", "nearest: 0")
        decays = all(0 <= beta < 1 for beta in self.betas)
        require(self, path, "betas", decays, "must both lie in [0, 1)", "the paper uses [0.9, 0.95]")
        require(self, path, "clip_norm", self.clip_norm > 0, "must be positive", "the paper uses 1.0")


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """The loop. Sizes are in sequences of `model.context_length` tokens.

    Attributes:
        steps: optimiser steps in the run.
        batch_size: sequences per step, over all devices.
        microbatch_size: sequences per forward and backward pass, on each device (all that it has of a batch); smaller
            ones are accumulated.
        log_every: steps between lines of metrics.jsonl.
        evaluate_every: steps between evaluations.
        evaluation_batches: batches of an evaluation, always the same ones.
        checkpoint_every: steps between checkpoints.
        unroll: layers per iteration of the scan over layers; more compiles longer and can run faster.
    """

    steps: int = 1000
    batch_size: int = 8
    microbatch_size: int | None = None
    log_every: int = 10
    evaluate_every: int = 100
    evaluation_batches: int = 8
    checkpoint_every: int = 100
    unroll: int = 1

    def validate(self, layers: int, path: str = "training") -> None:
        """Raises InputError on a broken rule."""
        require_types(self, path)
        require_least(self, path, 1, *(field.name for field in dataclasses.fields(self)))
        self._require_microbatch(self.batch_size, f"{path}.batch_size {self.batch_size}", path)
        rule = f"must not exceed model.layers {layers}"
        require(self, path, "unroll", self.unroll <= layers, rule, f"nearest: {layers}")

    def on(self, parts: int, path: str = "training") -> "TrainingConfig":
        """The settings where a batch is divided into so many parts; raises InputError where it does not divide.

        Args:
            parts: mesh.data times mesh.fsdp.
            path: of this section, for messages.
        """
        rule = f"does not divide over mesh.data times mesh.fsdp, which is {parts} devices"
        nearest = f"nearest: {nearest_multiples(self.batch_size, parts)}"
        require(self, path, "batch_size", self.batch_size % parts == 0, rule, nearest)
        own = self.batch_size // parts
        self._require_microbatch(own, f"the {own} sequences that a device has of a batch", path)
        return filled(self, microbatch_size=own)

    def _require_microbatch(self, sequences: int, of: str, path: str) -> None:
        micro = self.microbatch_size
        if micro is not None:
            nearest = f"nearest: {nearest_divisors(micro, sequences)}"
            require(self, path, "microbatch_size", sequences % micro == 0, f"does not divide {of}", nearest)
