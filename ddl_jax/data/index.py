"""The index of prepared shards: what made them, where documents begin, and which tokenizer they need."""

from collections.abc import Iterable
import hashlib
import json
from pathlib import Path

from ddl_jax.data.tokenizer import FILE_NAME, ByteTokenizer, Tokenizer
from ddl_jax.errors import InputError

INDEX = "index.json"
FORMAT = "ddl-shards-1"  # of index and journal; another number where their meaning changes


def describe_tokenizer(name: str, tokenizer: Tokenizer) -> dict:
    """What an index says of a tokenizer.

    Args:
        name: `bytes`, `gpt2`, or the path of a tokenizer.json, which another machine does not have.
    """
    file = None if isinstance(tokenizer, ByteTokenizer) else FILE_NAME
    return {
        "name": name if name in ("bytes", "gpt2") else FILE_NAME,
        "vocabulary": tokenizer.vocab_size,
        "separator": tokenizer.separator,
        "pieces_sha256": tokenizer.fingerprint,
        "file": file,
        "file_sha256": None if file is None else hashlib.sha256(tokenizer.to_json().encode()).hexdigest(),
    }


def read_record(path: Path) -> dict | None:
    """An index or journal, or None where there is no such file or it is someone else's.

    Raises:
        InputError: it cannot be read.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise InputError(f"{str(path)!r} cannot be read: {reason}; restore it, or remove its folder") from None
    ours = isinstance(record, dict) and "format" in record and record["format"] == FORMAT
    return record if ours else None


def require_tokenizer(paths: Iterable[str], name: str, tokenizer: Tokenizer) -> None:
    """Checks the tokenizer of a run against the indices that lie beside its shards.

    Args:
        paths: of the shards.
        name: data.tokenizer.
        tokenizer: that it stands for.

    Raises:
        InputError: an index says that another one made the shards, or cannot be read.
    """
    for folder in sorted({Path(path).parent for path in paths}):
        index = read_record(folder / INDEX)
        if index is None:
            continue
        made_by = index["tokenizer"]
        if made_by["pieces_sha256"] != tokenizer.fingerprint:
            right = made_by["name"] if made_by["name"] in ("bytes", "gpt2") else str(folder / FILE_NAME)
            raise InputError(
                f"data.tokenizer {name!r} is not the one that made the shards in {str(folder)!r}, as {INDEX} there says"
                f"; use {right!r}"
            )
