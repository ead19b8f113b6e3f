"""Files of official weights: .safetensors, or .npz as the golden files are; never a pickle."""

from collections.abc import Callable
import importlib.util
import json
import os
from pathlib import Path
import shutil
from typing import Any, NamedTuple

import numpy as np

from ddl_jax.atomic import write_atomically
from ddl_jax.config.rules import plain, plain_path
from ddl_jax.errors import InputError

ENDINGS = (".safetensors", ".npz")
PICKLES = (".pt", ".pth", ".bin", ".ckpt")
PARAMETER = "param/"  # in front of a tensor's name in a golden file


class Weights(NamedTuple):
    """An official model, as it is stored.

    Attributes:
        options: the official keyword arguments, or None where the file does not say.
        tensors: by official name.
        variant: likewise, or None.
    """

    options: dict[str, Any] | None
    tensors: dict[str, np.ndarray]
    variant: str | None


def require_ending(path: Path, option: str) -> None:
    """Raises InputError unless the file's name says that it is of a kind that we read and write."""
    shown = f"{option} {plain_path(path)!r}"
    if path.suffix in PICKLES:
        raise InputError(
            f"{shown} is a pickle, which can run any code and is not read; where PyTorch is: from safetensors.torch "
            f"import save_file; save_file({{n: t.clone() for n, t in torch.load({path.name!r}, weights_only=True)"
            f".items()}}, {path.with_suffix('.safetensors').name!r})"
        )
    if path.suffix not in ENDINGS:
        raise InputError(f"{shown} must end in {' or '.join(ENDINGS)}")


def read_weights(path: Path) -> Weights:
    """The official model in a file.

    Raises:
        InputError: the file cannot be read, is damaged, or is not of a kind that we read.
    """
    require_ending(path, "file")
    read = _read_npz if path.suffix == ".npz" else _read_safetensors
    return _reading(path, lambda: read(path))


def read_json(path: Path) -> dict[str, Any]:
    """The official keyword arguments in a JSON file; raises InputError if there are none."""
    return _reading(path, lambda: _mapping(path.read_text(encoding="utf-8")))


def _reading(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{plain_path(path)} cannot be read: {error.strerror or plain(str(error))}") from None
    except Exception as error:  # whatever the libraries raise on damaged files
        raise InputError(f"{plain_path(path)} is damaged or no {path.suffix} file: {plain(str(error))}") from None


def _mapping(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__}, not an object")
    return found


def _read_npz(path: Path) -> Weights:
    with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
        golden = any(name.startswith(PARAMETER) for name in file.files)
        names = [name for name in file.files if name.startswith(PARAMETER) or (not golden and name != "config")]
        tensors = {name.removeprefix(PARAMETER): file[name] for name in names}
        about = _mapping(str(file["config"])) if "config" in file.files else {}
    if "variant" in about:
        return _described(about["config"], tensors, about["variant"])
    return Weights(about or None, tensors, None)


def _described(options: Any, tensors: dict[str, np.ndarray], variant: Any) -> Weights:
    if not isinstance(options, dict) or not isinstance(variant, str):
        raise ValueError(f"it says variant {variant!r} and options {options!r}, not a name and an object")
    return Weights(options, tensors, variant)


def _read_safetensors(path: Path) -> Weights:
    _require_library()
    import ml_dtypes  # noqa: F401, tells NumPy of bfloat16
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        about = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dictionary
    if "variant" not in about:
        return Weights(None, tensors, None)
    return Weights(_mapping(about["options"]), tensors, about["variant"])


def _require_library() -> None:
    if importlib.util.find_spec("safetensors") is None:
        raise InputError(
            "a .safetensors file needs the package 'safetensors', which is not installed; pip install -e '.[weights]'"
        )


def write_weights(path: Path, weights: Weights) -> None:
    """Writes an official model: the tensors, and beside them the keyword arguments as JSON.

    Raises:
        InputError: the file's name, or a package that is missing.
        OSError: it cannot be written; nothing is left behind.
    """
    require_ending(path, "file")
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    options = json.dumps(weights.options, indent=2)
    try:
        if path.suffix == ".npz":
            about = json.dumps({"variant": weights.variant, "config": weights.options})
            with open(partial, "wb") as file:
                np.savez(file, config=about, **{PARAMETER + name: array for name, array in weights.tensors.items()})
        else:
            _require_library()
            from safetensors import SafetensorError
            from safetensors.numpy import save_file

            # "pt" is what transformers asks for before it reads a file.
            about = {"format": "pt", "variant": weights.variant, "options": options}
            try:
                save_file(weights.tensors, partial, metadata=about)
            except SafetensorError as error:  # of a full disk, too
                raise OSError(str(error)) from None
        write_atomically(path.with_suffix(".json"), options + "\n")
        shutil.copymode(path.with_suffix(".json"), partial)  # safetensors lets nobody else read its files
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
