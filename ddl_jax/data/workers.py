"""Processes that work for another one."""

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """Has this process end when its parent does: one that was killed cannot tell it, and it would wait forever."""
    threading.Thread(target=_wait, daemon=True).start()


def _wait() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
