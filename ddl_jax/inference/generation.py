"""Text from a model: prompts in, their continuations out, as they come or whole."""

from collections.abc import Iterator, Sequence
import functools
from numbers import Integral

import jax
import jax.numpy as jnp
import numpy as np

from ddl_jax.config.rules import shown
from ddl_jax.data import Tokenizer
from ddl_jax.errors import InputError
from ddl_jax.inference import decode
from ddl_jax.inference.sampling import DEFAULT, Sampling, draw
from ddl_jax.inference.text import Text
from ddl_jax.transformer import Transformer

# Prompts are padded, and room for tokens is made, up to multiples: programs are compiled for sizes, and these are few.
MULTIPLE = 32


def generate(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    tokens: int = 100,
    sampling: Sampling = DEFAULT,
    seed: int = 0,
    stop: Sequence[str] = (),
) -> list[str]:
    """Continues each prompt.

    Args:
        model: any Transformer.
        tokenizer: the model's.
        prompts: at least one. An empty one begins a new document.
        tokens: at most this many for each prompt; fewer where a stop or the end of the document comes before.
        sampling: how tokens are drawn.
        seed: of the draws. The text of a prompt depends on the seed and its place in the list, not on other prompts.
        stop: strings that end a text, and are no part of it.

    Returns:
        The continuations, without their prompts.

    Raises:
        InputError: an argument breaks a rule.
    """
    pieces = list(stream(model, tokenizer, prompts, tokens=tokens, sampling=sampling, seed=seed, stop=stop))
    return ["".join(parts) for parts in zip(*pieces, strict=True)]


def stream(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    tokens: int = 100,
    sampling: Sampling = DEFAULT,
    seed: int = 0,
    stop: Sequence[str] = (),
) -> Iterator[list[str]]:
    """As `generate`, while it goes on: for each token the text that it has added to each row, which may be none.

    Arguments are checked at once, not when the first text is asked for.
    """
    for name, texts in (("prompts", prompts), ("stop", stop)):
        if isinstance(texts, str):  # whose letters would each be one
            raise InputError(f"{name} {shown(texts)} must be a list of texts, e.g. [{shown(texts)}]")
    if not all(stop):
        raise InputError("an empty stop would end every text at once; leave it out")
    rows = [_encoded(tokenizer, prompt) for prompt in prompts]
    found = next_tokens(model, rows, tokens=tokens, sampling=sampling, seed=seed, vocab_size=tokenizer.vocab_size)
    return _pieces([Text(tokenizer, stop) for _ in rows], found, tokens)


def _encoded(tokenizer: Tokenizer, prompt: str) -> np.ndarray:
    if not isinstance(prompt, str):
        raise InputError(f"prompt {shown(prompt)} must be text")
    if not prompt:
        return np.array([tokenizer.separator], np.int32)
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # of a command line, bytes that are no UTF-8
        raise InputError(
            f"prompt {shown(prompt)} is not text: character {error.start + 1} is half of one; leave it out"
        ) from None
    return tokenizer.encode(prompt)


def _pieces(texts: list[Text], found: Iterator[np.ndarray], tokens: int) -> Iterator[list[str]]:
    for number, new in enumerate(found, 1):
        pieces = [text.add(int(token)) for text, token in zip(texts, new, strict=True)]
        yield pieces if number < tokens else [piece + text.rest() for piece, text in zip(pieces, texts, strict=True)]
        if all(text.done for text in texts):
            return


def next_tokens(
    model: Transformer,
    prompts: Sequence[np.ndarray],
    *,
    tokens: int,
    sampling: Sampling = DEFAULT,
    seed: int = 0,
    vocab_size: int | None = None,
) -> Iterator[np.ndarray]:
    """The tokens after each prompt.

    Args:
        model: any Transformer.
        prompts: (length,) integers each, at least one.
        tokens: how many for each prompt.
        sampling: how they are drawn.
        seed: of the draws.
        vocab_size: only smaller tokens are drawn; the embedding may have more rows than the tokenizer has tokens.

    Yields:
        (prompts,) int32: the next token of each. The step after it is under way by then.
    """
    sampling.validate()
    if not isinstance(tokens, Integral) or tokens < 1:
        raise InputError(f"tokens {shown(tokens)} must be a whole number, at least 1; nearest: 1")
    if not prompts or not all(map(len, prompts)):
        raise InputError("a prompt holds no tokens; give at least one")
    most = model.config.vocab_size
    vocab_size = most if vocab_size is None else min(vocab_size, most)  # a converted model may have fewer than GPT-2
    largest = max(int(np.max(prompt)) for prompt in prompts)
    if largest >= vocab_size or min(int(np.min(prompt)) for prompt in prompts) < 0:
        raise InputError(f"a prompt holds token {largest}, outside the vocabulary of {vocab_size}")
    return _next_tokens(model, prompts, tokens, sampling, seed, vocab_size)


def _next_tokens(model, prompts, tokens, sampling, seed, vocab_size) -> Iterator[np.ndarray]:
    columns = _rounded_up(max(map(len, prompts)))
    padded = np.zeros((len(prompts), columns), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[columns - len(prompt) :] = prompt
    padding = np.array([columns - len(prompt) for prompt in prompts], np.int32)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(len(prompts)))
    logits, past = decode.prefill(
        model, padded, padding if padding.any() else None, slots=columns + _rounded_up(tokens)
    )
    options = {"sampling": sampling, "vocab_size": vocab_size}
    token = drawn(logits, keys, jnp.int32(0), **options)
    decoder = decode.decoder(model) if tokens > 1 else None
    for number in range(1, tokens):
        following, past = next_token(decoder, token, past, keys, jnp.int32(number), **options)
        yield np.asarray(token)
        token = following
    yield np.asarray(token)


def _rounded_up(count: int) -> int:
    return -(-count // MULTIPLE) * MULTIPLE


@functools.partial(jax.jit, static_argnames=("sampling", "vocab_size"))
def drawn(logits, keys, number, *, sampling, vocab_size):
    """The token with the given number, counted from the first one after the prompt."""
    return draw(logits[:, :vocab_size], jax.vmap(jax.random.fold_in, (0, None))(keys, number), sampling)


@functools.partial(jax.jit, static_argnames=("sampling", "vocab_size"), donate_argnames="past")
def next_token(decoder, token, past, keys, number, *, sampling, vocab_size):
    """The token after the one given, and the past with that."""
    logits, past = decode.step(decoder, token, past)
    return drawn(logits, keys, number, sampling=sampling, vocab_size=vocab_size), past
