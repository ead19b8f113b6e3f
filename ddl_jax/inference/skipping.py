"""Leaving out edits whose gate is nearly closed. β needs the context alone, so that their sublayer can be skipped."""

from flax import nnx

from ddl_jax.config.residual import EDITS
from ddl_jax.errors import InputError
from ddl_jax.transformer import Transformer


def skipping(model: Transformer, below: float) -> Transformer:
    """The model with every edit left out whose gate β is below a threshold.

    Which edits these are depends on a row's own tokens, not on the others in its batch, and is the same over whole
    sequences and token by token. Time is only saved by a step for one token, and there by sublayers that no row of the
    batch needs: of an MLP all of it, of attention all but queries, keys and values.

    Args:
        model: with gates. Its parameters are shared, not copied.
        below: the threshold, within (0, 2].

    Raises:
        InputError: the threshold is outside, or the model has no gates.
    """
    kind = model.config.residual.kind
    if kind not in EDITS:
        raise InputError(f"edits cannot be skipped: kind {kind!r} has no gate; use a run with kind 'delta'")
    if not 0 < below <= 2:
        raise InputError(f"skip_below {below} must lie in (0, 2], as gates do; nearest: {2.0 if below > 2 else 0.01}")
    model = nnx.merge(*nnx.split(model))
    model.stream.updates.skip_below = float(below)
    return model
