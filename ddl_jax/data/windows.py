"""Tokens cut into windows, each a row of a batch."""

import functools

import numpy as np

from ddl_jax.data.stored import StoredTokens, Stretch, require_vocabulary

Batch = dict[str, np.ndarray]
Tokens = np.ndarray | StoredTokens

# Each map holds its file open, and a process may commonly have 1024 files open.
MOST_MAPS = 256


def rows_of(tokens: Tokens) -> tuple[np.ndarray | Stretch, ...]:
    """The rows that windows are cut from: the stretches in files, or the one text in memory."""
    return tokens.stretches if isinstance(tokens, StoredTokens) else (tokens,)


class Windows:
    """Tokens cut into windows of context_length + 1, each beginning with the last token of the one before.

    What is left at the end of a row, fewer than context_length tokens, is in no window.

    Args:
        tokens: (tokens,) integers, or where they are stored.
        context_length: T, tokens of a sequence.
    """

    def __init__(self, tokens: Tokens, context_length: int):
        self.tokens, self.context_length = tokens, context_length
        self._rows = rows_of(tokens)
        # The first token of a row is never a target.
        counts = [max(len(row) - 1, 0) // context_length for row in self._rows]
        self._first = np.cumsum([0, *counts])  # window of each row
        self._mapped = functools.lru_cache(MOST_MAPS)(Stretch.map)

    def __reduce__(self):
        return Windows, (self.tokens, self.context_length)

    def __len__(self) -> int:
        return int(self._first[-1])

    def __call__(self, indices: np.ndarray) -> Batch:
        """The windows of (B,) indices: `tokens` and, shifted by one, `targets`, both (B, T) int32.

        Raises:
            InputError: a stored token is outside the vocabulary.
        """
        length = self.context_length
        numbers = np.searchsorted(self._first, indices, side="right") - 1
        starts = (indices - self._first[numbers]) * length
        both = np.empty((len(indices), length + 1), np.int32)
        for window, number, start in zip(both, numbers.tolist(), starts.tolist(), strict=True):
            row = self._rows[number]
            tokens = self._mapped(row) if isinstance(row, Stretch) else row
            window[:] = tokens[start : start + length + 1]
        if isinstance(self.tokens, StoredTokens):
            self._check(both, numbers)
        return {"tokens": both[:, :-1], "targets": both[:, 1:]}

    def _check(self, windows: np.ndarray, numbers: np.ndarray) -> None:
        # Unsigned, where an id that does not fit an int32 is large and not negative.
        windows = windows.view(np.uint32)
        if windows.max(initial=0) >= self.tokens.vocab_size:
            for window, number in zip(windows, numbers, strict=True):
                require_vocabulary(window, self.tokens.vocab_size, self._rows[number].path)
