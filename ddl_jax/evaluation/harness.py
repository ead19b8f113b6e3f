"""A run as lm-evaluation-harness sees a model."""

from collections.abc import Iterable, Sequence
import itertools
from typing import NamedTuple

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ddl_jax.errors import InputError
from ddl_jax.evaluation.devices import Placed, on_all_devices
from ddl_jax.evaluation.progress import Counted
from ddl_jax.evaluation.scores import Row, Score, Scorer
from ddl_jax.inference import Sampling, generate
from ddl_jax.run import Run

WRITTEN = 256  # tokens at most, where a task says nothing: the library's own default


class HarnessModel(TemplateLM):
    """A run, for `lm_eval.simple_evaluate(model=HarnessModel(...))`.

    Args:
        run: as loaded.
        placed: the same on all devices.

    Raises:
        InputError: the tokenizer has more tokens than the model.
    """

    def __init__(self, run: Run, placed: Placed | None = None):
        super().__init__()
        size, most = run.tokenizer.vocab_size, run.model.config.vocab_size
        if size > most:
            raise InputError(
                f"tasks need a model for text: the tokenizer's vocabulary, {size}, is larger than the model's, {most}"
            )
        placed = on_all_devices(run) if placed is None else placed
        self._run, self._batch_size = run, placed.config.training.batch_size
        self._scorer = Scorer(placed)

    @property
    def eot_token_id(self) -> int:
        """The separator: what a document begins after, in training too. The library puts it before empty contexts."""
        return self._run.tokenizer.separator

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """Our tokenizers add nothing to a text, and never make a separator of it."""
        return self._run.tokenizer.encode(string).tolist()

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """ln p of each continuation after its context, and whether greedy decoding would give it."""
        return super().loglikelihood(requests, disable_tqdm=True)  # ours is the only bar

    def _loglikelihood_tokens(self, requests, **kwargs) -> list[tuple[float, bool]]:
        return [tuple(score) for score in self._scores(self._rows(*tokens) for _, *tokens in requests)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """ln p of each whole text, every token predicted once."""
        texts = (self.tok_encode(request.args[0]) for request in requests)
        return [score.logprob for score in self._scores(self._windows(self.prefix_token_id, text) for text in texts)]

    def _rows(self, context: list[int], continuation: list[int]) -> Sequence[Row]:
        """What is scored together: one row that keeps the end of the context, unless the continuation is too long."""
        if len(continuation) > self._scorer.longest:
            return self._windows(context[-1], continuation)
        return [Row(tuple(context + continuation)[-self._scorer.longest - 1 :], len(continuation))]

    def _windows(self, before: int, tokens: list[int]) -> Sequence[Row]:
        windows = get_rolling_token_windows(tokens, before, max_seq_len=self._scorer.longest, context_len=1)
        return [Row((*context, *scored), len(scored)) for context, scored in map(make_disjoint_window, windows)]

    def _scores(self, texts: Iterable[Sequence[Row]]) -> list[Score]:
        """Of each text, the scores of its rows added up."""
        texts = list(texts)
        found = self._scorer(row for rows in texts for row in rows)
        parts = [[found[row] for row in rows] for rows in texts]
        return [Score(sum(part.logprob for part in text), all(part.greedy for part in text)) for text in parts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the run writes after each context, up to a stop of the task's. Of a long context the end is read."""
        settings = [_settings(request.args[1]) for request in requests]
        contexts = [self._end(request.args[0]) for request in requests]
        texts = [""] * len(requests)
        with Counted("writing, texts", len(requests)) as progress:
            for kind in dict.fromkeys(settings):
                alike = [number for number, other in enumerate(settings) if other == kind]
                alike.sort(key=lambda number: -len(contexts[number]))
                for batch in itertools.batched(alike, self._batch_size):
                    prompts = [contexts[number] for number in batch]
                    prompts += prompts[:1] * (self._batch_size - len(prompts))  # one size, one program
                    written = generate(self._run.model, self._run.tokenizer, prompts, **kind._asdict())
                    for number, text in zip(batch, written, strict=False):
                        texts[number] = text
                    progress.advance(len(batch))
        return texts

    def _end(self, context: str) -> str:
        tokens = self._run.tokenizer.encode(context)
        longest = self._scorer.longest
        return context if len(tokens) <= longest else self._run.tokenizer.decode(tokens[-longest:])


class _Settings(NamedTuple):
    """Of `generate`."""

    tokens: int
    sampling: Sampling
    stop: tuple[str, ...]


def _settings(given: dict) -> _Settings:
    """A task's `generation_kwargs`, as ours."""
    known = normalize_gen_kwargs(given, default_max_gen_toks=WRITTEN)
    sampling = Sampling(temperature=0)  # the likeliest token, unless it says otherwise
    if known["do_sample"]:
        sampling = Sampling(known.get("temperature", 1.0), known.get("top_k"), known.get("top_p"))
    return _Settings(known["max_gen_toks"], sampling, tuple(text for text in known["until"] if text))
