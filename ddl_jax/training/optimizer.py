"""AdamW after clipping by global norm, under linear warm-up and cosine decay."""

from flax import nnx
import jax
import optax

from ddl_jax.config import OptimizerConfig


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear from 0 to the peak over the warm-up, then cosine to `final_fraction` of it after the last step."""
    return optax.schedules.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=steps,
        end_value=config.final_fraction * config.learning_rate,
    )


def decays(parameters: nnx.State) -> nnx.State:
    """True for each parameter that has weight decay: the weights. Decided by role, not by number of dimensions."""

    def decays_one(variable: nnx.Param) -> nnx.Param:
        return variable.replace(variable.role == "weight")

    return jax.tree.map(decays_one, parameters, is_leaf=lambda node: isinstance(node, nnx.Variable))


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The chain: clip by global norm, AdamW with decay on weights, the schedule."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate_schedule(config, steps),
            b1=config.betas[0],
            b2=config.betas[1],
            weight_decay=config.weight_decay,
            mask=decays,
        ),
    )
