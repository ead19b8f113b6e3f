"""Data: a corpus becomes tokens, and tokens become batches. Never imports JAX; Grain and tokenizers only in use."""

import dataclasses
from pathlib import Path
from typing import Literal

from ddl_jax.config import DataConfig
from ddl_jax.data.corpora import load_documents, matching_files, split, text_hash
from ddl_jax.data.index import require_tokenizer
from ddl_jax.data.pipeline import NO_TARGET, held_out, train_batches, validation_batches
from ddl_jax.data.shards import read_shards
from ddl_jax.data.tokenizer import ByteTokenizer, SubwordTokenizer, Tokenizer, load_tokenizer, make_tokenizer
from ddl_jax.data.tokens import encode_documents
from ddl_jax.data.windows import Tokens, Windows, rows_of
from ddl_jax.errors import InputError

__all__ = [
    "NO_TARGET",
    "ByteTokenizer",
    "Corpus",
    "SubwordTokenizer",
    "Tokenizer",
    "Windows",
    "encode_documents",
    "held_out",
    "load_documents",
    "load_tokenizer",
    "make_tokenizer",
    "prepare",
    "read_shards",
    "split",
    "text_hash",
    "train_batches",
    "validation_batches",
]


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """A corpus, split and encoded.

    Attributes:
        train: (tokens,) uint16 or int32, a separator after every document; or where shards store them.
        validation: likewise; none of its documents is in `train`, but for those that `read_shards` cuts.
        tokenizer: what encoded them.
        fingerprint: SHA-256, to tell whether two runs read the same: of all documents, or of what `read_shards` reads.
        unit: what the corpus consists of.
        train_units: how many of them `train` holds.
        validation_units: how many of them `validation` holds.
    """

    train: Tokens
    validation: Tokens
    tokenizer: Tokenizer
    fingerprint: str
    unit: Literal["documents", "shards"]
    train_units: int
    validation_units: int

    def record(self) -> dict[str, str | int]:
        """What tells this corpus from another, under names that say what it was found from."""
        name = {"documents": "text_sha256", "shards": "shards_fingerprint"}[self.unit]
        return {
            name: self.fingerprint,
            f"train_{self.unit}": self.train_units,
            "train_tokens": len(self.train),
            f"validation_{self.unit}": self.validation_units,
            "validation_tokens": len(self.validation),
        }


def prepare(config: DataConfig, context_length: int, run_dir: Path) -> Corpus:
    """Reads, splits and encodes a corpus, or opens one that is encoded already.

    Args:
        config: resolved.
        context_length: tokens of a sequence; each side must hold at least one.
        run_dir: where the tokenizer is looked for, and kept.

    Raises:
        InputError: the corpus, the tokenizer or the context length cannot be used.
    """
    corpus = (_shards if config.corpus == "shards" else _documents)(config, run_dir)
    sides = {"training": rows_of(corpus.train), "validation": rows_of(corpus.validation)}
    longest = {side: max(map(len, rows)) for side, rows in sides.items()}
    name = min(longest, key=longest.get)
    most = longest[name] - 1  # the last token is only ever a target
    if context_length > most:
        text = {"documents": f"the {name} text", "shards": f"the {name} part of every shard"}[corpus.unit]
        raise InputError(
            f"model.context_length {context_length} exceeds {text} ({longest[name]:,} tokens, the last of "
            f"which is only predicted); {f'nearest: {most}' if most > 0 else 'name more data'}"
        )
    return corpus


def _documents(config: DataConfig, run_dir: Path) -> Corpus:
    documents = load_documents(config)
    train, validation = split(documents, config.validation_fraction)
    tokenizer = make_tokenizer(config, train, run_dir)
    return Corpus(
        train=encode_documents(train, tokenizer),
        validation=encode_documents(validation, tokenizer),
        tokenizer=tokenizer,
        fingerprint=text_hash(documents),
        unit="documents",
        train_units=len(train),
        validation_units=len(validation),
    )


def _shards(config: DataConfig, run_dir: Path) -> Corpus:
    paths = matching_files(config.paths)
    tokenizer = make_tokenizer(config, [], run_dir)
    require_tokenizer(paths, config.tokenizer, tokenizer)
    train, validation, fingerprint = read_shards(paths, config.validation_fraction, tokenizer.vocab_size)
    return Corpus(
        train=train,
        validation=validation,
        tokenizer=tokenizer,
        fingerprint=fingerprint,
        unit="shards",
        train_units=len(train.stretches),
        validation_units=len(validation.stretches),
    )
