"""A run as lm-evaluation-harness sees a model."""

from collections.abc import Iterable, Sequence

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ddl_jax.evaluation.devices import Placed
from ddl_jax.evaluation.scores import Row, Score, Scorer
from ddl_jax.run import Run


class HarnessModel(TemplateLM):
    """A run, for `lm_eval.simple_evaluate(model=HarnessModel(...))`.

    Args:
        run: as loaded.
        placed: the same on all devices.
    """

    def __init__(self, run: Run, placed: Placed):
        super().__init__()
        self._tokenizer = run.tokenizer
        self._scorer = Scorer(placed)

    @property
    def eot_token_id(self) -> int:
        """The separator: what a document begins after, in training too. The library puts it before empty contexts."""
        return self._tokenizer.separator

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """Our tokenizers add nothing to a text, and never make a separator of it."""
        return self._tokenizer.encode(string).tolist()

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
        raise NotImplementedError
