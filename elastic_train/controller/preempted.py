"""The notice of Google Cloud: the machine's metadata service says that it is being taken away, half a minute before."""

from __future__ import annotations

import time
from collections.abc import Callable

from elastic_train.controller.spot_notice import NoAnswer, SpotNotice

GCP_ENDPOINT = "http://169.254.169.254"
_PATH = "/computeMetadata/v1/instance/preempted"
_NOTICE_SECONDS = 30.0
"""Google promises no more; the service does not say when."""


class Preempted(SpotNotice):
    """Asks one machine's metadata service. Arguments are those of ``SpotNotice``."""

    def __init__(self, endpoint: str, clock: Callable[[], float] = time.time) -> None:
        super().__init__(endpoint, clock)
        self._end: float | None = None

    def ask(self) -> tuple[float, str] | None:
        """Seconds until the end, counted from when it was first said, and "preempted"; None: no notice.

        Raises:
            NoAnswer: also for an answer that cannot be understood.
        """
        status, body = self._request("GET", _PATH, {"Metadata-Flavor": "Google"})
        answer = body.strip()
        if status != 200 or answer not in (b"TRUE", b"FALSE"):
            raise NoAnswer(f"GET {_PATH} is answered with status {status} and {answer[:40]!r}, not TRUE or FALSE")
        if answer == b"FALSE":
            return None
        if self._end is None:
            self._end = self._clock() + _NOTICE_SECONDS
        return self._end - self._clock(), "preempted"
