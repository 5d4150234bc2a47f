"""An outage of object storage on demand, for `elastic-train chaos store-outage`: this process does not reach it."""

from __future__ import annotations

import time

_until = 0.0


def begin(seconds: float) -> None:
    """From now on, for ``seconds``, every request to S3 of this process fails like one to a dead endpoint."""
    global _until
    _until = time.monotonic() + seconds


def seconds_left() -> float:
    """0.0 when there is none."""
    return max(0.0, _until - time.monotonic())
