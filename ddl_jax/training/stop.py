"""Stopping on request: SIGTERM or Ctrl-C asks, the loop saves and ends. A second Ctrl-C does not wait."""

import signal


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
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
