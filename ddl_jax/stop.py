"""Stopping on request: SIGTERM or Ctrl-C asks, the work in hand ends in good order. A second Ctrl-C does not wait."""

from collections.abc import Iterator
import contextlib
import ctypes
import gc
import os
import signal
import sys
from types import FrameType

SAID = b"\nstopping in good order; Ctrl-C once more stops at once\n"


class StopRequest:
    """True once a stop has been asked for. For a `with` statement, in the main thread."""

    def __init__(self):
        self.asked = False

    def __bool__(self) -> bool:
        return self.asked

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _ask(self, number, frame) -> None:
        self.asked = True
        os.write(2, SAID)  # print may not be called while another print is interrupted
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


WAIT = 0.05  # seconds


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Has Ctrl-C raise KeyboardInterrupt, again where that was swallowed. For a `with` statement, in the main thread.

    Out of the import of a module or library it would come as another error, and out of a callback of the garbage
    collector (jax has one) not at all, with a traceback in either case: there it waits; a second Ctrl-C does not.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # others see to it, or it is to be ignored
        yield
        return
    waiting, raised = False, None

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal waiting, raised
        signal.setitimer(signal.ITIMER_REAL, WAIT)  # to look what became of it
        if number == signal.SIGALRM and _is_on_its_way(raised):
            return
        if _is_lost(frame) and not (waiting and number == signal.SIGINT):
            waiting = True
            return
        waiting, raised = False, KeyboardInterrupt()
        raise raised

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGALRM, signal.SIGINT)}
    try:
        yield
    except Exception:
        if raised is None:
            raise
        raise KeyboardInterrupt from None  # which has become another error on its way
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raised = None  # and the frames it knows
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_on_its_way(raised: KeyboardInterrupt | None) -> bool:
    """Whether what it passes through is being cleaned up."""
    error = sys.exception()
    while error is not None and error is not raised:
        error = error.__context__
    return error is not None


def _is_lost(frame: FrameType | None) -> bool:
    """Whether an exception raised here would not arrive."""
    callbacks = [callback.__code__ for callback in gc.callbacks if hasattr(callback, "__code__")]
    while frame is not None:
        file = frame.f_code.co_filename
        if frame.f_code in callbacks or file.startswith("<frozen importlib") or file == ctypes.__file__:
            return True
        frame = frame.f_back
    return False
