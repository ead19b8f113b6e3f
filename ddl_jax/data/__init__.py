"""Data: a corpus becomes tokens, and tokens become batches. Never imports JAX; Grain and tokenizers only in use."""

import dataclasses
from pathlib import Path

import numpy as np

from ddl_jax.config import DataConfig
from ddl_jax.data.corpora import load_documents, split, text_hash
from ddl_jax.data.pipeline import NO_TARGET, train_batches, validation_batches
from ddl_jax.data.tokenizer import ByteTokenizer, SubwordTokenizer, Tokenizer, load_tokenizer, make_tokenizer
from ddl_jax.data.tokens import encode_documents
from ddl_jax.errors import InputError

__all__ = [
    "NO_TARGET",
    "ByteTokenizer",
    "Corpus",
    "SubwordTokenizer",
    "Tokenizer",
    "encode_documents",
    "load_documents",
    "load_tokenizer",
    "make_tokenizer",
    "prepare",
    "split",
    "text_hash",
    "train_batches",
    "validation_batches",
]


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """A corpus, split and encoded.

    Attributes:
        train: (tokens,) uint16 or int32; a separator follows every document.
        validation: (tokens,) likewise; none of its documents is in `train`.
        tokenizer: what encoded them.
        text_hash: SHA-256 of all documents, to tell whether two runs read the same text.
        train_documents: how many documents `train` holds.
        validation_documents: how many documents `validation` holds.
    """

    train: np.ndarray
    validation: np.ndarray
    tokenizer: Tokenizer
    text_hash: str
    train_documents: int
    validation_documents: int


def prepare(config: DataConfig, context_length: int, run_dir: Path) -> Corpus:
    """Reads, splits and encodes a corpus.

    Args:
        config: resolved.
        context_length: tokens of a sequence; each side must hold at least one.
        run_dir: where the tokenizer is looked for, and kept.

    Raises:
        InputError: the corpus, the tokenizer or the context length cannot be used.
    """
    documents = load_documents(config)
    train, validation = split(documents, config.validation_fraction)
    tokenizer = make_tokenizer(config, train, run_dir)
    corpus = Corpus(
        train=encode_documents(train, tokenizer),
        validation=encode_documents(validation, tokenizer),
        tokenizer=tokenizer,
        text_hash=text_hash(documents),
        train_documents=len(train),
        validation_documents=len(validation),
    )
    sides = {"training": corpus.train, "validation": corpus.validation}
    name = min(sides, key=lambda side: len(sides[side]))
    longest = len(sides[name]) - 1  # the last token is only ever a target
    if context_length > longest:
        raise InputError(
            f"model.context_length {context_length} exceeds the {name} text ({len(sides[name]):,} tokens, the last of "
            f"which is only predicted); nearest: {longest}"
        )
    return corpus
