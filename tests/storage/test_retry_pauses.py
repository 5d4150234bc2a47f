"""How long S3 requests pause before they are repeated: computed, and kept on a clock that only pauses move."""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable

import pytest
import tenacity
from botocore.exceptions import ClientError
from tenacity import Future, RetryCallState, Retrying

from elastic_train.storage import s3_retry
from elastic_train.storage.errors import StorageError
from elastic_train.storage.s3_retry import SHORTEST_PAUSE_SECONDS, RetryCount, retried

BROKEN = ConnectionResetError("reset by peer")
DRAWS = 2000


def answer(code: str, status: int, **headers: str) -> ClientError:
    metadata = {"HTTPStatusCode": status, "HTTPHeaders": {key.replace("_", "-"): text for key, text in headers.items()}}
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": metadata}, "GetObject")  # type: ignore[arg-type]


BUSY = answer("SlowDown", 503)


def draws(error: Exception, attempt: int, left: float = 1000.0) -> list[float]:
    """Pauses after the ``attempt``-th failure."""
    state = RetryCallState(Retrying(), None, (), {})
    state.attempt_number = attempt
    state.outcome = Future.construct(attempt, error, has_exception=True)
    return [s3_retry._pause(state, left) for _ in range(DRAWS)]


@pytest.mark.parametrize(
    ("error", "limits"),
    [
        (BROKEN, [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]),
        (answer("InternalError", 500), [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]),
        (BUSY, [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 20.0, 20.0]),
        (answer("TooManyRequests", 429), [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 20.0, 20.0]),
    ],
)
def test_pauses_are_spread_evenly_up_to_a_limit_that_doubles(error: Exception, limits: list[float]) -> None:
    """Full jitter. With 2,000 draws, a tenth of the range with fewer than 100 of them has a chance below 1e-10."""
    for attempt, limit in enumerate(limits, 1):
        pauses = draws(error, attempt)
        assert min(pauses) >= SHORTEST_PAUSE_SECONDS
        assert max(pauses) <= limit
        for tenth in range(10):
            low, high = limit * tenth / 10, limit * (tenth + 1) / 10
            held = sum(1 for pause in pauses if low <= pause <= high)
            assert held > 100 or high <= SHORTEST_PAUSE_SECONDS, (attempt, tenth, held)


def test_the_limit_stays_the_same_after_many_attempts() -> None:
    assert max(draws(BROKEN, 10_000)) <= 5.0


def test_what_is_left_of_the_budget_limits_a_pause_but_never_below_what_the_server_asks_for() -> None:
    assert max(draws(BUSY, 9, left=0.3)) <= 0.3
    assert set(draws(BUSY, 9, left=-1.0)) == {SHORTEST_PAUSE_SECONDS}
    asked = draws(answer("SlowDown", 503, retry_after="7"), 9, left=0.3)
    assert set(asked) == {7.0}
    assert max(draws(answer("SlowDown", 503, retry_after="Fri, 31 Dec 1999 23:59:59 GMT"), 1)) <= 0.5


class Clock:
    """Of this thread: what others of the process retry meanwhile goes by the real one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        self._thread = threading.get_ident()
        patch.setattr(tenacity, "time", types.SimpleNamespace(monotonic=self.monotonic))
        patch.setattr(tenacity.nap, "time", types.SimpleNamespace(sleep=self.sleep))

    def monotonic(self) -> float:
        return self.now if threading.get_ident() == self._thread else time.monotonic()

    def sleep(self, seconds: float) -> None:
        if threading.get_ident() != self._thread:
            time.sleep(seconds)
            return
        self.pauses.append(seconds)
        self.now += seconds


def failing(error: Exception) -> Callable[[], None]:
    def request() -> None:
        raise error

    return request


@pytest.mark.parametrize("error", [BROKEN, BUSY])
@pytest.mark.parametrize("budget", [0.5, 30.0])
def test_pauses_of_one_request_differ_and_end_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, error: Exception, budget: float
) -> None:
    clock, seen = Clock(monkeypatch), []
    for _ in range(20):
        clock.now, clock.pauses, count = 0.0, [], RetryCount()
        with pytest.raises(StorageError, match="s3://bucket/x"):
            retried("s3://bucket/x", budget, count, failing(error))
        assert clock.now < budget
        assert sum(count.so_far().values()) == len(clock.pauses)
        seen.append(tuple(clock.pauses))
    assert len(set(seen)) == 20  # no two requests are in step with each other
    if budget == 30.0:
        assert all(len(set(pauses)) > 1 for pauses in seen)


def test_a_server_that_asks_for_more_than_the_budget_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, count = Clock(monkeypatch), RetryCount()
    with pytest.raises(StorageError):
        retried("s3://bucket/x", 5.0, count, failing(answer("SlowDown", 503, retry_after="7")))
    assert (clock.pauses, count.so_far()) == ([], {})
