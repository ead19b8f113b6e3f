"""Files that are there whole or not at all."""

import os
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes bytes, or text as UTF-8, under a name of their own and renames it.

    Raises:
        OSError: where that fails; nothing is left.
    """
    content = content.encode() if isinstance(content, str) else content
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
