"""How fast models make tokens, several compared token by token."""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
import time

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from ddl_jax.config import Config
from ddl_jax.inference import decode
from ddl_jax.inference.generation import drawn, next_token
from ddl_jax.inference.sampling import Sampling
from ddl_jax.residual.kernels import explain
from ddl_jax.training.step import init_state, model_graph
from ddl_jax.transformer.auto import with_dtypes

GREEDY = Sampling(temperature=0)
WARMUP = 3  # tokens that are not counted


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured: every batch with every context, each up to every length.

    Attributes:
        batch: rows.
        context: tokens of each row's prompt.
        generated: tokens made after it; times are means over the first so many.
    """

    batch: tuple[int, ...]
    context: tuple[int, ...]
    generated: tuple[int, ...]  # ascending


class Contender:
    """One model, its parameters those it starts with, on one device."""

    def __init__(self, config: Config):
        devices = jax.local_devices()[:1]
        self.config = dataclasses.replace(config, model=with_dtypes(config.model, devices))
        self.model = nnx.merge(model_graph(self.config, devices), init_state(self.config).parameters)
        self.decoder = decode.decoder(self.model)

    def begin(self, batch: int, context: int, generated: int) -> float:
        """Takes in a prompt; returns the seconds for it, if the programs are compiled."""
        vocabulary = self.config.model.vocab_size
        tokens = jax.random.randint(jax.random.key(0), (batch, context), 0, vocabulary)
        self._keys = jax.random.split(jax.random.key(1), batch)
        self._options = {"sampling": GREEDY, "vocab_size": vocabulary}
        jax.block_until_ready(tokens)
        begun = time.perf_counter()
        logits, self._past = decode.prefill(self.model, tokens, None, slots=context + WARMUP + generated)
        self._token = drawn(logits, self._keys, jnp.int32(0), **self._options)
        jax.block_until_ready(self._token)
        return time.perf_counter() - begun

    def next(self, number: int) -> float:
        """Makes a token for each row; returns the seconds for it."""
        begun = time.perf_counter()
        self._token, self._past = next_token(
            self.decoder, self._token, self._past, self._keys, jnp.int32(number), **self._options
        )
        jax.block_until_ready(self._token)
        return time.perf_counter() - begun


def measure_decode(
    configs: Sequence[tuple[str, Config]], sizes: Sizes, rounds: int, advance: Callable[[], None] = lambda: None
) -> list[dict]:
    """Times each configuration's prompt and tokens, taking turns token by token.

    Args:
        configs: names and resolved configurations, model.vocab_size included.
        sizes: what is measured.
        rounds: how often each is; figures are medians of them.
        advance: called `len(sizes.batch) * len(sizes.context) * rounds` times on the way.

    Returns:
        For each: `config`, `decode`: rows with `batch`, `context`, `generated`, `milliseconds_per_token`,
        `decode_tokens_per_second` of all rows of the batch, `decode_ratio` (of speeds, to the first configuration) and
        `prompt_seconds`; of the longest `generated`, by batch and context, `milliseconds_per_token` and
        `decode_tokens_per_second`; and `kernels` as in training.
    """
    contenders = [Contender(config) for _, config in configs]
    longest = max(sizes.generated)
    rows: list[list[dict]] = [[] for _ in configs]
    for batch, context in itertools.product(sizes.batch, sizes.context):
        prompt_seconds = np.zeros((len(configs), rounds))
        seconds = np.zeros((len(configs), rounds, WARMUP + longest))
        for contender in contenders:
            contender.begin(batch, context, longest)  # compiles
        for round_number in range(rounds):
            for which, contender in enumerate(contenders):
                prompt_seconds[which, round_number] = contender.begin(batch, context, longest)
            for number in range(WARMUP + longest):
                for which, contender in enumerate(contenders):
                    seconds[which, round_number, number] = contender.next(number + 1)
            advance()
        for generated in sizes.generated:
            means = np.median(np.mean(seconds[..., WARMUP : WARMUP + generated], axis=-1), axis=-1)
            for row, mean, prompt in zip(rows, means.tolist(), prompt_seconds, strict=True):
                row.append({
                    "batch": batch,
                    "context": context,
                    "generated": generated,
                    "milliseconds_per_token": 1e3 * mean,
                    "decode_tokens_per_second": batch / mean,
                    "decode_ratio": float(means[0]) / mean,
                    "prompt_seconds": float(np.median(prompt)),
                })  # fmt: skip
    return [
        {
            "config": name,
            "milliseconds_per_token": _by_size(row, "milliseconds_per_token"),
            "decode_tokens_per_second": _by_size(row, "decode_tokens_per_second"),
            "decode": row,
            "kernels": explain(config.model.residual, config.model.width, jax.local_devices()[:1]),
        }
        for (name, config), row in zip(configs, rows, strict=True)
    ]


def _by_size(rows: list[dict], name: str) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for row in rows:  # the longest comes last
        found.setdefault(str(row["batch"]), {})[str(row["context"])] = row[name]
    return found
