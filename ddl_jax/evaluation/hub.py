"""The hub that data sets come from. Without a network: at once what to fetch elsewhere, not minutes of tries."""

from collections.abc import Iterable
import os
import sys
import threading
import urllib.error
import urllib.request

SECONDS = 5.0  # to wait for the hub's answer
OFFLINE = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}


def settle() -> None:
    """Sets the library of data sets to work from its cache alone where the hub does not answer, and to say little.

    To be called before the library is imported: it looks at the environment then.
    """
    if not sys.stderr.isatty():
        os.environ |= {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ["DISABLE_MULTIPROC"] = "1"  # of lm_eval's bootstrap: a fork of a process that has jax's threads may hang
    asked = any(os.environ.get(name, "0").lower() in ("1", "on", "yes", "true") for name in OFFLINE)
    if asked or not _answers(_address()):
        os.environ |= OFFLINE


def _address() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co")


def _answers(address: str) -> bool:
    """Whether there is an answer of any kind. In a thread, since looking up a name knows no time limit."""
    found = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=SECONDS).close()
        except urllib.error.HTTPError:
            pass  # an answer, too
        except (OSError, ValueError):
            return
        found.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return found.is_set()


def recipe(data_sets: Iterable[tuple[str, str | None]]) -> str:
    """How to bring data sets to a machine without a network.

    Args:
        data_sets: the path of each on the hub, and the name of its part.
    """
    names = [f"load({path!r}, {name!r})" if name else f"load({path!r})" for path, name in dict.fromkeys(data_sets)]
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    program = f"from datasets import load_dataset as load; {'; '.join(names)}"
    return (
        f'where there is a network: pip install datasets && python -c "{program}"; copy '
        f"~/.cache/huggingface from there to {home} here; then the same command with HF_DATASETS_OFFLINE=1 before it"
    )
