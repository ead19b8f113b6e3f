"""Tokens that stay in their files, read by memory map."""

import dataclasses

import numpy as np

from ddl_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Tokens that lie one after another in a file.

    Attributes:
        path: of the file.
        dtype: of a token, as NumPy spells it ("<u2").
        offset: where the first token begins, in bytes.
        count: how many tokens.
    """

    path: str
    dtype: str
    offset: int
    count: int

    def __len__(self) -> int:
        return self.count

    def map(self) -> np.ndarray:
        """(count,) tokens, of which only those that are looked at are read."""
        # As a plain array: a slice of NumPy's memmap class takes several times as long.
        return np.memmap(self.path, self.dtype, "r", self.offset, (self.count,)).view(np.ndarray)


@dataclasses.dataclass(frozen=True)
class StoredTokens:
    """Stretches in order. Another process is sent the names of the files, not the tokens.

    Attributes:
        stretches: where the tokens are; no window straddles two of them.
        vocab_size: every token is smaller, or reading it is an error.
    """

    stretches: tuple[Stretch, ...]
    vocab_size: int

    def __len__(self) -> int:
        return sum(map(len, self.stretches))


def require_vocabulary(tokens: np.ndarray, vocab_size: int, path: str) -> None:
    """Raises InputError unless every token of the file at `path` is smaller than `vocab_size`."""
    largest = int(tokens.max(initial=0))
    if largest >= vocab_size:
        raise InputError(
            f"data.paths: {path!r} holds token {largest}, outside data.tokenizer's vocabulary of {vocab_size}; "
            "name the tokenizer that made it"
        )
