"""Log-likelihoods in batches: those of a direct computation, whatever the batches, chunks and lengths."""

import functools

import jax
import numpy as np
import pytest

from ddl_jax.evaluation import scores
from ddl_jax.evaluation.devices import on_all_devices
from ddl_jax.evaluation.scores import Row, Score, Scorer, padded_length, token_scores
from ddl_jax.run import Run, load_run

# The same float32 operations, batched and padded otherwise. Seen: 3e-7.
CLOSE = 3e-6


@pytest.fixture(scope="module")
def run(run_of_eight):
    return load_run(run_of_eight)


@functools.cache
def compiled(model):
    return jax.jit(lambda tokens: model(tokens))


def logits_of(run: Run, tokens: list[int]) -> np.ndarray:
    """(tokens, vocabulary) float64: of the whole model, all at once."""
    padded = np.zeros((1, run.config.model.context_length), np.int32)  # what follows changes nothing, nor the program
    padded[0, : len(tokens)] = tokens
    return np.asarray(compiled(run.model)(padded), np.float64)[0, : len(tokens)]


def direct(run: Run, tokens: list[int], scored: int) -> Score:
    """From the logits of the model."""
    logits = logits_of(run, tokens[:-1])[-scored:]
    logprobs = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    targets = np.array(tokens[-scored:])
    chosen = np.take_along_axis(logprobs, targets[:, None], axis=-1)
    return Score(float(chosen.sum()), bool(np.all(logits.argmax(axis=-1) == targets)))


def random_rows(longest: int) -> list[Row]:
    rng = np.random.default_rng(0)
    lengths = [2, 3, longest + 1, *rng.integers(2, longest + 2, 9).tolist()]
    return [Row(tuple(rng.integers(0, 257, n).tolist()), int(rng.integers(1, n))) for n in lengths]


@pytest.mark.parametrize("chunk", [5, 1024])
def test_each_target_is_scored_and_positions_without_one_cost_no_logits(run, monkeypatch, chunk):
    """With chunks of 5, the 13 targets fill three of them, the last in part."""
    monkeypatch.setattr(scores, "CHUNK", chunk)
    rng = np.random.default_rng(1)
    tokens, targets = rng.integers(0, 257, (2, 3, 16))
    targets[rng.permuted(np.arange(48)).reshape(3, 16) >= 13] = -1
    logits = np.stack([logits_of(run, row.tolist()) for row in tokens])
    targets[0, 3] = logits[0, 3].argmax()  # a greedy one is among them
    expected = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    found, greedy = jax.jit(lambda *batch: token_scores(run.model, *batch))(tokens, targets)
    there = targets >= 0
    np.testing.assert_allclose(
        np.asarray(found)[there], np.take_along_axis(expected, np.maximum(targets, 0)[..., None], -1)[..., 0][there],
        rtol=CLOSE,
    )  # fmt: skip
    np.testing.assert_array_equal(np.asarray(greedy)[there], (logits.argmax(-1) == targets)[there])
    assert np.asarray(greedy)[0, 3]
    assert np.count_nonzero(found) <= (15 if chunk == 5 else 48)


@pytest.mark.parametrize("batch_size", [1, 5])
def test_batches_and_lengths_do_not_change_a_score(run, monkeypatch, batch_size):
    monkeypatch.setattr(scores, "SHORTEST", 8)  # so that these short rows have several lengths
    rows = random_rows(16)
    found = Scorer(on_all_devices(run, batch_size))(iter(rows))
    for row in rows:
        expected = direct(run, list(row.tokens), row.scored)
        assert found[row].logprob == pytest.approx(expected.logprob, rel=CLOSE)
        assert found[row].greedy == expected.greedy


def test_a_row_is_computed_once_and_programs_are_few(run, monkeypatch):
    monkeypatch.setattr(scores, "SHORTEST", 4)
    scorer, shapes = Scorer(on_all_devices(run, 4)), []

    def step(parameters, tokens, targets):
        shapes.append(tokens.shape)
        return np.zeros(tokens.shape, np.float32), np.ones(tokens.shape, bool)

    monkeypatch.setattr(scorer, "_step", step)
    rows = random_rows(16)
    scorer([*rows, *reversed(rows), rows[0]])
    assert len(shapes) == 3  # 12 rows
    assert [length for _, length in shapes] == sorted((length for _, length in shapes), reverse=True)
    assert {size for size, _ in shapes} == {4}


def test_the_lengths_of_batches():
    lengths = {padded_length(tokens, 1024) for tokens in range(1, 1025)}
    assert sorted(lengths) == [32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    assert all(tokens <= padded_length(tokens, 1000) <= 1000 for tokens in range(1, 1001))


def test_nothing_to_score(run):
    scorer = Scorer(on_all_devices(run, 2))
    assert scorer([]) == {}
    assert scorer([Row((1, 2), 0)]) == {Row((1, 2), 0): Score(0.0, True)}


def test_the_logits_of_all_tokens_never_exist_at_once(run, monkeypatch):
    """Read from the compiled program: 1,024 tokens, 32 of them at a time."""
    monkeypatch.setattr(scores, "CHUNK", 32)
    batch = [jax.ShapeDtypeStruct((64, 16), np.int32)] * 2
    program = jax.jit(lambda *batch: token_scores(run.model, *batch)).lower(*batch).compile()
    all_logits = 1024 * run.config.model.vocab_size * 4
    assert program.memory_analysis().temp_size_in_bytes < all_logits / 2
