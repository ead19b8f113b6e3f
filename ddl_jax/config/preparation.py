"""The settings of `ddl prepare`: which text becomes which shards."""

import dataclasses

from ddl_jax.config.rules import shown
from ddl_jax.errors import InputError

MOST_TOKENS = 2**31 - 1  # of a shard: its header counts them in 32 bits
MOST_WORKERS = 1024


@dataclasses.dataclass(frozen=True)
class PreparationConfig:
    """Which text becomes which shards.

    Attributes:
        sources: glob patterns of Parquet, JSONL and text files.
        out: folder of the shards.
        tokenizer: `bytes`, `gpt2`, or the path of a tokenizer.json.
        text_field: the column of Parquet files, or the field of JSON objects, that holds the text.
        validation_fraction: share of the documents that is held out, by the hash of their content; 0 holds out none.
        shard_tokens: a shard holds whole documents of at most so many tokens together, or a single longer one.
        workers: processes that encode; 0 does it in this process.
    """

    sources: tuple[str, ...]
    out: str
    tokenizer: str
    text_field: str = "text"
    validation_fraction: float = 0.001
    shard_tokens: int = 100_000_000
    workers: int = 0

    def validate(self) -> None:
        """Raises InputError, in terms of the command line, on a broken rule."""
        _require(bool(self.sources), "SOURCE is missing; name files, e.g. 'fineweb/*.parquet'")
        for pattern in self.sources:
            _require(bool(pattern.strip()), f"SOURCE {shown(pattern)} names no file")
        _require(bool(self.out.strip()), "--out must name a folder, e.g. --out shards")
        _require(self.out.isprintable(), f"--out {shown(self.out)} must be printable text")
        _require(bool(self.text_field), "--text-field must name a column or field, e.g. text")
        _require(
            self.tokenizer != "bpe",
            "--tokenizer 'bpe' is trained on text, which is not done here; name the tokenizer.json that a run with "
            "data.tokenizer: bpe leaves in its run_dir",
        )
        _require(
            self.tokenizer in ("bytes", "gpt2") or self.tokenizer.endswith(".json"),
            f"--tokenizer {shown(self.tokenizer)} is not a tokenizer; use 'bytes', 'gpt2' or the path of a "
            "tokenizer.json",
        )
        _between("--validation-fraction", self.validation_fraction, 0, 0.9)
        _between("--shard-tokens", self.shard_tokens, 1, MOST_TOKENS)
        _between("--workers", self.workers, 0, MOST_WORKERS)


def _between(option: str, value: float, low: float, high: float) -> None:
    within = low <= value <= high  # not so for nan
    nearest = min(max(value, low), high) if value == value else low
    _require(within, f"{option} {value} must lie in [{low}, {high}]; nearest: {nearest}")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InputError(message)
