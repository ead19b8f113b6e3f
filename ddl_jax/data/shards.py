"""Token shards: files in llm.c's .bin layout, as published for FineWeb-Edu and written by `ddl prepare`."""

from collections.abc import Iterable
import hashlib
import os
import re

import numpy as np

from ddl_jax.data.stored import StoredTokens, Stretch, require_vocabulary
from ddl_jax.errors import InputError

# The header is 256 little-endian 32-bit words: magic number, version, count of tokens, zeros. Tokens follow to the end.
HEADER_BYTES = 1024
MAGIC = 20240520
# Of a token, by version: llm.c's for GPT-2, and ours for vocabularies above 65,536.
DTYPES = {1: "<u2", 2: "<u4"}
# Tokens at each end of a shard that are looked at before a run: all of them would be minutes for 100 GB.
BLOCK = 32_768


def read_shards(
    paths: Iterable[str], validation_fraction: float, vocab_size: int
) -> tuple[StoredTokens, StoredTokens, str]:
    """Opens shards and holds some of their tokens out.

    Shards with the word `val` or `validation` in the name of their file (`edu_fineweb_val_000000.bin`) are held out.
    Where no name has it, the end of every shard is, cut at a token: the document there may be on both sides, since
    where documents end is not known.

    Args:
        paths: of the files, at least one, in the order of their tokens.
        validation_fraction: share of each shard's tokens to hold out, within (0, 1), where no file is for validation.
        vocab_size: every token must be smaller; checked at both ends of each shard here, elsewhere as it is read.

    Returns:
        The training and the validation tokens, and a fingerprint that changes with the names, sizes, headers and ends
        of the files. What lies between their ends is not read.

    Raises:
        InputError: a file cannot be read, is not a shard, is cut short, is empty or holds a token outside the
            vocabulary, or every file is for validation.
    """
    digest = hashlib.sha256()
    shards = [_open_shard(path, vocab_size, digest) for path in paths]
    named = [bool({"val", "validation"} & set(re.split("[^a-z]+", _name(shard).lower()))) for shard in shards]
    if all(named):
        raise InputError(
            f"data.paths: all {len(shards)} shards are for validation, as 'val' in {_name(shards[0])!r} says; name "
            "shards to train on, too"
        )
    if any(named):
        train = [shard for shard, held_out in zip(shards, named, strict=True) if not held_out]
        validation = [shard for shard, held_out in zip(shards, named, strict=True) if held_out]
    else:
        train, validation = zip(*(_cut(shard, validation_fraction) for shard in shards), strict=True)
    return StoredTokens(tuple(train), vocab_size), StoredTokens(tuple(validation), vocab_size), digest.hexdigest()


def _open_shard(path: str, vocab_size: int, digest) -> Stretch:
    """The tokens of a shard, which is checked and added to the digest."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            header = file.read(HEADER_BYTES)
    except OSError as error:
        raise InputError(f"data.paths: {path!r} cannot be read: {error.strerror}; leave it out") from error
    magic, version, count = np.frombuffer(header[:12].ljust(12, b"\0"), "<i4").tolist()
    if len(header) < HEADER_BYTES or magic != MAGIC:
        raise InputError(
            f"data.paths: {path!r} is not a token shard: it does not begin with llm.c's header, magic number {MAGIC}; "
            "leave it out, or set data.corpus: files if it is text"
        )
    if version not in DTYPES:
        known = ", ".join(map(str, DTYPES))
        raise InputError(f"data.paths: {path!r} is a token shard of version {version}; known: {known}")
    shard = Stretch(path, DTYPES[version], HEADER_BYTES, count)
    expected = HEADER_BYTES + count * np.dtype(shard.dtype).itemsize
    if size != expected:
        raise InputError(
            f"data.paths: {path!r} has {size:,} bytes, but its header counts {count:,} tokens, so {expected:,} bytes; "
            "copy it again"
        )
    if count == 0:
        raise InputError(f"data.paths: {path!r} holds no tokens; leave it out")
    name = os.fsencode(_name(shard))
    digest.update(b"%d %d " % (len(name), size) + name + header)
    tokens = shard.map()
    for block in (tokens[:BLOCK], tokens[-BLOCK:]):
        require_vocabulary(block, vocab_size, path)
        digest.update(block.tobytes())
    return shard


def _cut(shard: Stretch, fraction: float) -> tuple[Stretch, Stretch]:
    """The beginning of a shard, and the given fraction at its end."""
    train = len(shard) - max(round(fraction * len(shard)), 1)
    offset = shard.offset + train * np.dtype(shard.dtype).itemsize
    return (
        Stretch(shard.path, shard.dtype, shard.offset, train),
        Stretch(shard.path, shard.dtype, offset, len(shard) - train),
    )


def _name(shard: Stretch) -> str:
    return os.path.basename(shard.path)
