"""A run behind lm-evaluation-harness: contexts, windows and answers, against a direct computation."""

from lm_eval.api.instance import Instance
import numpy as np
import pytest

from ddl_jax.errors import InputError
from ddl_jax.evaluation import harness
from ddl_jax.evaluation.devices import on_all_devices
from ddl_jax.evaluation.harness import HarnessModel
from ddl_jax.inference import Sampling, generate
from ddl_jax.run import load_run
from tests.evaluation.test_scores import CLOSE, direct, logits_of

LONGEST = 16  # context_length of the run
SEPARATOR = 256


@pytest.fixture(scope="module")
def run(run_of_eight):
    return load_run(run_of_eight)


@pytest.fixture(scope="module")
def model(run):
    return HarnessModel(run, on_all_devices(run, 4))


def instances(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def encoded(text: str) -> list[int]:
    return list(text.encode())


def test_the_likelihood_of_a_continuation(run, model):
    pairs = [("abc", "def"), ("a", "b"), ("trailing ", "space"), ("é", "è")]
    found = model.loglikelihood(instances("loglikelihood", *pairs))
    for (context, continuation), (logprob, greedy) in zip(pairs, found, strict=True):
        scored = len(encoded(continuation)) + (context == "trailing ")  # the space is predicted, too
        expected = direct(run, encoded(context + continuation), scored)
        assert logprob == pytest.approx(expected.logprob, rel=CLOSE) and greedy == expected.greedy


def test_a_model_for_fewer_tokens_than_the_tokenizer_has_is_refused(run):
    class Larger(type(run.tokenizer)):
        vocab_size = 50257

    with pytest.raises(InputError, match="the tokenizer's vocabulary, 50257, is larger than the model's"):
        HarnessModel(run._replace(tokenizer=Larger()))


def test_the_answers_come_in_the_order_of_the_questions(run, model):
    pairs = [("x" * n, "ab"[n % 2]) for n in (3, 1, 9, 2, 7, 1, 12, 3)]
    found = [logprob for logprob, _ in model.loglikelihood(instances("loglikelihood", *pairs))]
    expected = [direct(run, encoded(context + continuation), 1).logprob for context, continuation in pairs]
    np.testing.assert_allclose(found, expected, rtol=CLOSE)


def test_greedy_is_what_greedy_decoding_gives(run, model):
    tokens = encoded("ab")
    for _ in range(3):
        tokens.append(int(logits_of(run, tokens)[-1].argmax()))
    other = [*tokens[:-1], (tokens[-1] + 1) % 256]
    ((_, yes),) = model._loglikelihood_tokens([(None, tokens[:2], tokens[2:])])
    ((_, no),) = model._loglikelihood_tokens([(None, tokens[:2], other[2:])])
    assert (yes, no) == (True, False)


def test_an_empty_context_is_one_separator_and_no_other_context_has_any(run, model, monkeypatch):
    seen, scores = [], model._scorer
    monkeypatch.setattr(model, "_scorer", Recorded(scores, seen))
    ((empty, _), _) = model.loglikelihood(instances("loglikelihood", ("", "abc"), ("<|endoftext|>", "x")))
    assert [row.tokens.count(SEPARATOR) for row in seen] == [1, 0]
    assert empty == pytest.approx(direct(run, [SEPARATOR, *encoded("abc")], 3).logprob, rel=CLOSE)


class Recorded:
    def __init__(self, scorer, seen):
        self.scorer, self.seen, self.longest = scorer, seen, scorer.longest

    def __call__(self, rows):
        rows = list(rows)
        self.seen += rows
        return self.scorer(rows)


@pytest.mark.parametrize("scored", [1, 5, LONGEST])
def test_a_long_context_loses_its_beginning(run, model, scored):
    text = "".join(chr(97 + n * n % 26) for n in range(40))
    pair = (text[:-scored], text[-scored:])
    ((found, _),) = model.loglikelihood(instances("loglikelihood", pair))
    kept = encoded(text)[-LONGEST - 1 :]
    assert found == pytest.approx(direct(run, kept, scored).logprob, rel=CLOSE)
    changed = direct(run, [encoded("z")[0], *kept[1:]], scored).logprob
    assert abs(found - changed) > 100 * CLOSE * abs(found)  # its first token counts


def windows(run, before: int, tokens: list[int]) -> float:
    """Each token once, in pieces of LONGEST; the last piece with all the context that there is room for."""
    tokens, total, done = [before, *tokens], 0.0, 1
    while done < len(tokens):
        end = min(done + LONGEST, len(tokens))
        total += direct(run, tokens[max(end - LONGEST - 1, 0) : end], end - done).logprob
        done = end
    return total


@pytest.mark.parametrize("length", [1, LONGEST - 1, LONGEST, LONGEST + 1, 2 * LONGEST, 41])
def test_a_whole_text_is_predicted_from_its_separator_each_token_once(run, model, length):
    text = "".join(chr(97 + n * n % 26) for n in range(length))
    (found,) = model.loglikelihood_rolling(instances("loglikelihood_rolling", (text,)))
    assert found == pytest.approx(windows(run, SEPARATOR, encoded(text)), rel=CLOSE)


def test_whole_texts_and_one_without_any(run, model):
    texts = ["abc", "", "abcdefghijklmnopqrstuvwxyz", "abc"]
    found = model.loglikelihood_rolling(instances("loglikelihood_rolling", *((text,) for text in texts)))
    np.testing.assert_allclose(found, [windows(run, SEPARATOR, encoded(text)) for text in texts], rtol=CLOSE)


def test_a_continuation_longer_than_the_window_is_predicted_in_windows(run, model):
    text = "".join(chr(97 + n * n % 26) for n in range(30))
    ((found, _),) = model.loglikelihood(instances("loglikelihood", (text[:5], text[5:])))
    assert found == pytest.approx(windows(run, encoded(text)[4], encoded(text[5:])), rel=CLOSE)


def test_texts_are_written_up_to_a_stop_in_the_order_asked_for(run, model, monkeypatch):
    seen = []
    monkeypatch.setattr(harness, "generate", lambda *given, **how: (seen.append(given[2]), generate(*given, **how))[1])
    long = "".join(chr(97 + n * n % 26) for n in range(40))
    contexts = ["abc", long, "", "b", "abcdef", "bc"]  # more than a batch
    greedy = {"until": ["q"], "max_gen_toks": 8}
    wanted = [(context, greedy) for context in contexts] + [("abc", {"until": ["\n"], "max_gen_toks": 3})]
    found = model.generate_until(instances("generate_until", *wanted))
    zero = {"sampling": Sampling(temperature=0)}
    contexts[1] = long[-LONGEST:]
    expected = [generate(run.model, run.tokenizer, [text], tokens=8, stop=["q"], **zero)[0] for text in contexts]
    assert found == [*expected, *generate(run.model, run.tokenizer, ["abc"], tokens=3, stop=["\n"], **zero)]
    assert any(found)
    assert [len(prompts) for prompts in seen] == [4, 4, 4]  # batches are filled up
    assert seen[0][0] == long[-LONGEST:]


def test_sampled_texts_are_drawn_as_the_task_says(run, model):
    given = {"until": [], "max_gen_toks": 6, "do_sample": True, "temperature": 0.7, "top_k": 5}
    found = model.generate_until(instances("generate_until", ("abc", given)))
    sampling = Sampling(temperature=0.7, top_k=5)
    assert found == generate(run.model, run.tokenizer, ["abc"], tokens=6, sampling=sampling)
