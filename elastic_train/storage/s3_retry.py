"""Repeats S3 requests: full jitter, a budget in seconds, longer pauses for a server that asks for them."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from botocore import exceptions as botocore_errors
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_before_delay

from elastic_train.storage.s3_errors import (
    PASSING_ERRORS,
    cause_of_retry,
    headers_of,
    is_passing,
    is_throttling,
    translate,
    without_traceback,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")

PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 5.0
BUSY_PAUSE_SECONDS, LONGEST_BUSY_PAUSE_SECONDS = 0.5, 20.0
"""For a server that says it is overloaded, which more requests only make worse."""


class RetryCount:
    """How many requests were repeated, by cause. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, cause: str) -> None:
        with self._lock:
            self._counts[cause] += 1

    def so_far(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


def retried(uri: str, budget_seconds: float, count: RetryCount, request: Callable[[], Result]) -> Result:
    """``request()``, repeated while errors pass and the budget lasts; then :class:`StorageError`."""
    started = time.monotonic()
    attempts = Retrying(
        retry=retry_if_exception(is_passing),
        stop=stop_before_delay(budget_seconds),
        wait=_pause,
        before_sleep=lambda state: count.add(cause_of_retry(_error(state))),
        reraise=True,
    )
    try:
        return attempts(request)
    except (botocore_errors.BotoCoreError, botocore_errors.ClientError, *PASSING_ERRORS) as error:
        raise translate(uri, error, time.monotonic() - started) from without_traceback(error)


def _error(state: RetryCallState) -> BaseException:
    error = state.outcome.exception() if state.outcome else None
    assert error is not None
    return error


def _pause(state: RetryCallState) -> float:
    """Seconds until the next attempt: "full jitter", a random part of a limit that doubles each time.

    https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/. Never less than ``Retry-After`` asks for.
    """
    error = _error(state)
    busy = is_throttling(error)
    first, longest = (
        (BUSY_PAUSE_SECONDS, LONGEST_BUSY_PAUSE_SECONDS) if busy else (PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
    )
    limit = min(longest, first * 2.0 ** min(state.attempt_number - 1, 30))
    return max(_asked_pause(error), random.uniform(0.0, limit))


def _asked_pause(error: BaseException) -> float:
    asked = headers_of(error).get("retry-after", "")
    return float(asked) if asked.isdecimal() else 0.0  # the other form, a date, is not used by any S3 server
