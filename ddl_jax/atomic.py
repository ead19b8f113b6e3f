"""Files that are there whole or not at all."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Writes UTF-8 text under a name of its own and renames it; raises OSError and leaves nothing where that fails."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
