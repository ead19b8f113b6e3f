"""Tokens as they come, as text: whole characters, up to a stop."""

from collections.abc import Sequence

from ddl_jax.data import Tokenizer

UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are no character yet, or never
LONGEST = 4  # bytes of a character
WAITING = 64  # tokens that are decoded again at most, where no character ends


class Text:
    """The text of one row of tokens.

    Attributes:
        done: whether a stop has come. What follows is no part of the text.

    Args:
        tokenizer: of the tokens.
        stop: strings that end the text. None of them is part of it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens: list[int] = []
        self._start = self._read = 0  # tokens before `_read` have become text; from `_start` on they are decoded again
        self._given = 0  # characters after those tokens that were text already
        self._held = ""  # may be the beginning of a stop
        self.done = False

    def add(self, token: int) -> str:
        """The text that a token completes, maybe none."""
        if self.done:
            return ""
        if token == self._tokenizer.separator:
            self.done = True
            return self.rest()
        self._tokens.append(token)
        return self._until_stop(self._completed())

    def rest(self) -> str:
        """What was held back, when no more tokens come."""
        text = self._until_stop(self._completed(last=True)) + self._held
        self._held = ""
        return text

    def _completed(self, last: bool = False) -> str:
        # With the tokens of the piece before: how one is written may depend on the one before it.
        before = self._tokenizer.decode(self._tokens[self._start : self._read])
        text = self._tokenizer.decode(self._tokens[self._start :])[len(before) :]
        # Only the end may still become a character: what is broken before it stays so.
        waiting = len(self._tokens) - self._read
        unfinished = 0 if last else len(text) - len(text.rstrip(UNFINISHED))
        if waiting >= LONGEST:
            unfinished = min(unfinished, LONGEST - 1)
        ready = text[: len(text) - unfinished]
        new = ready[self._given :]
        self._given = max(self._given, len(ready))
        if not unfinished:
            self._start, self._read, self._given = self._read, len(self._tokens), 0
        elif waiting >= WAITING:
            cut = len(self._tokens) - LONGEST**2
            passed = len(self._tokenizer.decode(self._tokens[self._start : cut])) - len(before)
            self._start, self._read, self._given = self._read, cut, max(self._given - passed, 0)
        return new

    def _until_stop(self, text: str) -> str:
        text = self._held + text
        ends = [found for stop in self._stop if (found := text.find(stop)) >= 0]
        if ends:
            self.done, self._held = True, ""
            return text[: min(ends)]
        longest = max((n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._held = text[len(text) - longest :]
        return text[: len(text) - longest]
