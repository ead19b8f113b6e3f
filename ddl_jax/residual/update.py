"""Updates: what one sublayer's output does to the residual state. The equations of the paper live in `DeltaUpdate`."""

from typing import Any

from flax import nnx
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jaxtyping import Array, Float

from ddl_jax.cache import Cache, of
from ddl_jax.config import ResidualConfig
from ddl_jax.linear import project
from ddl_jax.precision import at_least_float32
from ddl_jax.remat import PRODUCT
from ddl_jax.residual import reversible
from ddl_jax.residual.direction import DIRECTIONS
from ddl_jax.residual.gate import Gate
from ddl_jax.residual.reader import ChannelReader
from ddl_jax.residual.value import Value
from pallas_kernels import reversible_rewrite, reversible_rewrite_and_read, rewrite, rewrite_and_read
from pallas_kernels.layout import TokenAxes
from pallas_kernels.rewrite.xla import along, unit

State = Float[Array, "batch tokens channels width"]
Features = Float[Array, "batch tokens width"]


class AdditiveUpdate(nnx.Module):
    """X' = X + h in every channel: the plain residual addition, and its expanded control."""

    skip_below = 0.0  # it has no gate

    def __init__(self, config: ResidualConfig, width: int, rngs: nnx.Rngs, token_axes: TokenAxes = None):
        pass

    def write(self, state: State, branch: Features, context: Features, x: Features, cache: Cache | None = None):
        """The new state."""
        h = at_least_float32(branch)[:, :, None]
        return (at_least_float32(state) + h).astype(state.dtype)

    def write_then_read(self, state: State, branch: Features, context: Features, x: Features, reader, cache=None):
        """The new state and what `reader` sees of it."""
        state = self.write(state, branch, context, x)
        return state, reader(state, of(cache, "read"))

    def diagnostics(self, state: State, branch: Features, context: Features, x: Features) -> dict[str, Array]:
        return {}


class DeltaUpdate(nnx.Module):
    """X' = X + β k (vᵀ − kᵀX), with k = h / sqrt(‖h‖² + ε²) (paper eq. 2.2); write-only: X' = X + β k vᵀ."""

    def __init__(self, config: ResidualConfig, width: int, rngs: nnx.Rngs, token_axes: TokenAxes = None):
        self.epsilon = config.epsilon
        self.erase = config.kind == "delta"
        self.kernel, self.token_axes = config.kernel, token_axes
        # What models differ in comes last, so that they start from the same other parameters.
        self.value = Value(config.value, width, config.value_channels, rngs)
        self.gate = Gate(config.gate, width, rngs)
        self.direction = DIRECTIONS[config.direction](config, width, rngs)
        self.skip_below = 0.0  # edits with a gate below it are left out (`ddl_jax.inference.skipping`)
        # Value and gate are both linear in the context.
        self.joint = config.value.constant is None and config.value.source == "context" and config.gate.hidden == 0

    def edit(self, branch: Features, context: Features, x: Features, cache: Cache | None = None):
        """h (B, T, d), v (B, T, V) and β (B, T)."""
        h = self.direction(branch, context, cache)
        v, β = self._target(branch, context, x)
        return h, v, jnp.where(β < self.skip_below, 0, β) if self.skip_below else β

    def _target(self, branch: Features, context: Features, x: Features):
        """v and β."""
        if not self.joint:
            return self.value(branch, context, x), self.gate(context)
        # One pass over the context, and one over its gradient, for both.
        weights = jnp.concatenate([self.value.weight[...], self.gate.output[...][None]])
        products = checkpoint_name(project(at_least_float32(context), weights.T, "highest"), PRODUCT)
        return self.value.of(products[..., :-1]), self.gate.of(products[..., -1])

    def _options(self) -> dict[str, Any]:
        kernel = {"implementation": self.kernel, "token_axes": self.token_axes}
        return {"epsilon": self.epsilon, "erase": self.erase, **kernel}

    def write(self, state: State, branch: Features, context: Features, x: Features, cache: Cache | None = None):
        """The new state."""
        h, v, β = self.edit(branch, context, x, cache)
        return rewrite(state, h, v, β, **self._options())

    def write_then_read(self, state: State, branch: Features, context: Features, x: Features, reader, cache=None):
        """The new state and what `reader` sees of it, in one pass over the state where the reader allows it."""
        if not isinstance(reader, ChannelReader):
            state = self.write(state, branch, context, x, of(cache, "write"))
            return state, reader(state, of(cache, "read"))
        h, v, β = self.edit(branch, context, x, of(cache, "write"))
        return rewrite_and_read(state, h, v, β, reader.weights(), **self._options())

    def reversible_write_then_read(self, state: State, shadow: State, h: Features, v, β, reader):
        """(X, S) → (X', x, S), keeping no state for backward (see `reversible`)."""
        if isinstance(reader, ChannelReader):
            return reversible_rewrite_and_read(state, shadow, h, v, β, reader.weights(), **self._options())
        return reversible.read(reader, *reversible_rewrite(state, shadow, h, v, β, **self._options()))

    def diagnostics(self, state: State, branch: Features, context: Features, x: Features) -> dict[str, Array]:
        """The gate β, ρ = ‖k‖², and the discrepancy ‖v − kᵀX‖ before and after the edit, each (B, T)."""
        h, v, β = self.edit(branch, context, x)
        k, _ = unit(at_least_float32(h), self.epsilon)

        def discrepancy(state: State) -> Float[Array, "batch tokens"]:
            return jnp.linalg.norm(v - along(k, at_least_float32(state)), axis=-1)

        after = rewrite(state, h, v, β, **self._options())
        return {
            "gate": β,
            "rho": jnp.sum(k * k, axis=-1),
            "discrepancy_before": discrepancy(state),
            "discrepancy_after": discrepancy(after),
        }


UPDATES = {
    "additive": AdditiveUpdate,
    "additive_expanded": AdditiveUpdate,
    "write_only": DeltaUpdate,
    "delta": DeltaUpdate,
}
