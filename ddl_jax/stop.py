"""Stopping on request: SIGTERM or Ctrl-C asks, the work in hand ends in good order. A second Ctrl-C does not wait."""

import os
import signal

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
