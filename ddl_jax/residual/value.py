"""The value v (B, T, V): the read-out that each channel should have along the direction."""

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jaxtyping import Array, Float

from ddl_jax.config import ValueConfig
from ddl_jax.linear import project
from ddl_jax.parameters import bias, weight
from ddl_jax.precision import at_least_float32
from ddl_jax.remat import PRODUCT


class Value(nnx.Module):
    """v = scale · activation(W source + b), or a constant; in float32.

    The source is the normalised `context`, the un-normalised `read`, or the sublayer's output `branch`.
    """

    def __init__(self, config: ValueConfig, width: int, channels: int, rngs: nnx.Rngs):
        self.config = config
        self.channels = channels
        key = rngs.params()  # one, whatever is drawn with it: what others draw does not depend on it
        if config.constant is None:
            self.weight = weight(0.5 / width**0.5 * jax.random.normal(key, (channels, width), jnp.float32))
            if config.bias:
                bound, key = width**-0.5, jax.random.fold_in(key, 1)
                self.bias = bias(jax.random.uniform(key, (channels,), minval=-bound, maxval=bound))

    def __call__(
        self,
        branch: Float[Array, "batch tokens width"],
        context: Float[Array, "batch tokens width"],
        read: Float[Array, "batch tokens width"],
    ) -> Float[Array, "batch tokens channels"]:
        config = self.config
        if config.constant is not None:
            return jnp.full((*context.shape[:-1], self.channels), config.constant, at_least_float32(context).dtype)
        source = {"context": context, "read": read, "branch": branch}[config.source]
        return self.of(checkpoint_name(project(at_least_float32(source), self.weight[...].T, "highest"), PRODUCT))

    def of(self, product: Float[Array, "batch tokens channels"]) -> Float[Array, "batch tokens channels"]:
        """v from W source."""
        config = self.config
        logits = product + self.bias[...] if config.bias else product
        return config.scale * (jax.nn.sigmoid(logits) if config.activation == "sigmoid" else logits)
