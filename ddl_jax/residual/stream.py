"""The residual-stream interface: all that a Transformer knows about how its sublayers are joined.

    state = stream.expand(embedding)
    for i, (norm, sublayer) in enumerate(...):
        x = stream.read(state, i)                              what the sublayer sees
        context = norm(x)
        state = stream.write(state, sublayer(context), context, x, i)
    y = stream.reduce(state)                                   the final read

With a `cache` (`ddl_jax.cache`) at the end of each call, the tokens are those that follow the ones it has seen.
A model that scans over its layers takes `stream.first_read` and scans over `stream.connections()` instead: each
connection writes, then reads for the sublayer that follows, in one pass over the state.
"""

from flax import nnx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ddl_jax.cache import Cache, of
from ddl_jax.config import ResidualConfig
from ddl_jax.config.residual import HYPER
from ddl_jax.errors import InputError
from ddl_jax.parameters import at, numbered, stacked
from ddl_jax.residual.costs import Costs, stream_costs
from ddl_jax.residual.expansion import EXPANSIONS
from ddl_jax.residual.hyper_connections import HyperReader, HyperUpdate
from ddl_jax.residual.mhc import ManifoldReader, ManifoldUpdate
from ddl_jax.residual.mixing import with_sum
from ddl_jax.residual.reader import READERS
from ddl_jax.residual.update import UPDATES
from pallas_kernels.layout import TokenAxes

State = Float[Array, "batch tokens channels width"]
Features = Float[Array, "batch tokens width"]

# Update and reader of kinds that mix their streams.
MIXING = {"hyper_connections": (HyperUpdate, HyperReader), "mhc": (ManifoldUpdate, ManifoldReader)}


class Connection(nnx.Module):
    """One sublayer's update and the reader that follows it, cut out of a stream (or a stack of them)."""

    def __init__(self, update: nnx.Module, next_reader: nnx.Module):
        self.update = update
        self.next_reader = next_reader

    def write_then_read(
        self, state: State, branch: Features, context: Features, x: Features, cache: Cache | None = None
    ) -> tuple[State, Features]:
        """The state after this sublayer's write, and what comes to be read next."""
        return self.update.write_then_read(state, branch, context, x, self.next_reader, cache)


class DeltaStream(nnx.Module):
    """The residual stream of a whole model, of any kind: the delta rule, its controls, its rivals or the addition.

    Args:
        config: which kind, and its settings; None fields are filled in.
        width: d, the features of the embedding.
        sublayers: how many sublayers write into the stream (2 per Transformer block).
        rngs: the source of initial parameters.
        dtype: of the residual state.
        token_axes: the mesh axes that divide the batch. The kernels have to know where the mesh is the context's
            (`jax.set_mesh`) and its axes are Auto; not so inside of `jax.shard_map`.
    """

    def __init__(
        self,
        config: ResidualConfig,
        *,
        width: int,
        sublayers: int,
        rngs: nnx.Rngs,
        dtype: jnp.dtype = jnp.float32,
        token_axes: TokenAxes = None,
    ):
        if sublayers < 1:
            raise InputError(f"sublayers {sublayers} must be at least 1; nearest: 1")
        config = config.resolve(width)
        self.config, self.width, self.sublayers, self.dtype = config, width, sublayers, dtype
        # Sublayer i reads with reader i; shared, the two sublayers of a block have one. The last is the final read.
        self.readers_used = [i // 2 if config.shared_reader else i for i in range(sublayers)]
        self.readers_used.append(self.readers_used[-1] + 1)
        self.expansion = EXPANSIONS[config.expansion](config, width, rngs)
        if config.kind in HYPER:
            update, reader = MIXING[config.kind]
            self.updates = numbered(lambda rngs, number: update(config, width, rngs, number), sublayers, rngs)
            self.readers = numbered(lambda rngs, number: reader(config, width, rngs, number), sublayers, rngs)
            return
        self.updates = stacked(lambda rngs: UPDATES[config.kind](config, width, rngs, token_axes), sublayers, rngs)
        readers = self.readers_used[-1] + 1
        make_reader = READERS[config.reader]
        self.readers = stacked(lambda rngs: make_reader(config, width, rngs, token_axes), readers, rngs)

    def expand(self, embedding: Features, cache: Cache | None = None) -> State:
        """The first residual state."""
        return self.expansion(embedding, of(cache, "expansion")).astype(self.dtype)

    def read(self, state: State, sublayer: int, cache: Cache | None = None) -> Features:
        """What the given sublayer (counted from 0) sees."""
        return at(self._every_reader(), self.readers_used[sublayer])(state, of(cache, f"read {sublayer}"))

    def write(
        self, state: State, branch: Features, context: Features, x: Features, sublayer: int, cache: Cache | None = None
    ) -> State:
        """The state after the sublayer's output `branch`, computed from `context`, the norm of its read `x`."""
        return at(self.updates, sublayer).write(state, branch, context, x, of(cache, f"write {sublayer}"))

    def reduce(self, state: State, cache: Cache | None = None) -> Features:
        """The final read, for the last norm and the head."""
        return self.read(state, self.sublayers, cache)

    def connections(self) -> Connection:
        """A stack with one connection per sublayer; slice it, or scan over it."""
        return Connection(self.updates, at(self._every_reader(), jnp.array(self.readers_used[1:])))

    def _every_reader(self) -> nnx.Module:
        """A stack, with the final read behind the others, which in streams that are summed up has no parameters."""
        return with_sum(self.readers) if self.config.kind in HYPER else self.readers

    def costs(self) -> Costs:
        """FLOPs and elements moved, per token, of one forward pass through the stream."""
        return stream_costs(self.config, self.width, self.sublayers)

    def diagnostics(self, state: State, branch: Features, context: Features, x: Features, sublayer: int):
        """What the sublayer's write does, as a dict of arrays (B, T); empty for additive kinds."""
        return at(self.updates, sublayer).diagnostics(state, branch, context, x)
