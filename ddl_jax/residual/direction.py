"""Where the unnormalised direction h (B, T, d) comes from: the sublayer, or a light module over the context."""

from flax import nnx
import jax
from jaxtyping import Array, Float

from ddl_jax.cache import Cache, attend
from ddl_jax.config import ResidualConfig
from ddl_jax.linear import project
from ddl_jax.parameters import normal

Features = Float[Array, "batch tokens width"]


class SublayerDirection(nnx.Module):
    """h is the sublayer's output."""

    def __init__(self, config: ResidualConfig, width: int, rngs: nnx.Rngs):
        pass

    def remember(self, context: Features, cache: Cache) -> None:
        """Keeps what later tokens need of these, when their edit is left out: nothing."""

    def __call__(self, branch: Features, context: Features, cache: Cache | None = None) -> Features:
        return branch


class MlpDirection(nnx.Module):
    """h = W₂ gelu(W₁ c): the direction by a light MLP (first version of the paper)."""

    def __init__(self, config: ResidualConfig, width: int, rngs: nnx.Rngs):
        std = 0.5 / width**0.5
        self.output = normal(rngs, (config.direction_width, width), std, axes=(None, "width"))
        self.input = normal(rngs, (width, config.direction_width), std, axes=("width", None))

    def remember(self, context: Features, cache: Cache) -> None:
        """Keeps what later tokens need of these, when their edit is left out: nothing."""

    def __call__(self, branch: Features, context: Features, cache: Cache | None = None) -> Features:
        return project(jax.nn.gelu(project(context, self.input)), self.output)


class AttentionDirection(nnx.Module):
    """h by causal one-head attention over the context (first version of the paper)."""

    def __init__(self, config: ResidualConfig, width: int, rngs: nnx.Rngs):
        std = 0.5 / width**0.5
        self.output = normal(rngs, (config.direction_width, width), std, axes=(None, "width"))
        self.query = normal(rngs, (width, config.direction_width), std, axes=("width", None))
        self.key = normal(rngs, (width, config.direction_width), std, axes=("width", None))
        self.value = normal(rngs, (width, config.direction_width), std, axes=("width", None))

    def remember(self, context: Features, cache: Cache) -> None:
        """Keeps what later tokens need of these, when their edit is left out: keys and values."""
        cache.remember(*(project(context, w)[:, :, None] for w in (self.key, self.value)))

    def __call__(self, branch: Features, context: Features, cache: Cache | None = None) -> Features:
        query, key, value = (project(context, w)[:, :, None] for w in (self.query, self.key, self.value))
        return project(attend(query, key, value, cache)[:, :, 0], self.output)


DIRECTIONS = {"sublayer": SublayerDirection, "mlp": MlpDirection, "attention": AttentionDirection}
