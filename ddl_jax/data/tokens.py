"""Documents as one long row of tokens."""

import numpy as np

from ddl_jax.data.tokenizer import Tokenizer


def encode_documents(documents: list[str], tokenizer: Tokenizer) -> np.ndarray:
    """Encodes the documents one after another, the separator after each.

    Returns:
        (tokens,) uint16 where every id fits, else int32.
    """
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
    separator = np.array([tokenizer.separator], dtype)
    parts = [part for document in documents for part in (tokenizer.encode(document).astype(dtype), separator)]
    return np.concatenate(parts) if parts else np.empty(0, dtype)
