"""SIGINT and SIGTERM of the driver."""

from __future__ import annotations

import signal
import threading
from typing import Any


class StopSignals:
    """SIGINT and SIGTERM ask for a graceful stop; a second one ends the driver at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            self.install()
        return self

    def install(self) -> None:
        for number in self._previous:
            signal.signal(number, self._on_signal)

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number
