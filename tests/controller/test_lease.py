"""A host's lease ends before the coordinator's, whatever was lost on the way."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.config.operation import FailureConfig
from elastic_train.controller import lease as lease_module
from elastic_train.controller.coordinator import Coordinator
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.lease import Lease, heartbeat_seconds
from elastic_train.controller.wire import Message
from tests.jobs import make_job
from tests.local_job import LocalJob


@pytest.mark.parametrize(("seconds", "heartbeat", "holds"), [(4.0, 0.25, 3.25), (10.0, 0.5, 8.5), (1.0, 0.5, 0.75)])
def test_is_some_heartbeats_shorter_than_the_coordinators(seconds: float, heartbeat: float, holds: float) -> None:
    assert Lease(FailureConfig(lease_seconds=seconds, heartbeat_seconds=heartbeat), 0.0).seconds == holds


def test_counts_from_the_sending_of_the_heartbeat_that_was_answered() -> None:
    lease = Lease(FailureConfig(lease_seconds=4.0, heartbeat_seconds=0.25), 100.0)
    assert lease.left(103.0) == 0.25
    lease.answered(102.0)
    assert lease.left(103.0) == 2.25
    lease.answered(101.0)  # late
    assert lease.left(105.25) == 0.0


@given(
    delays=st.lists(st.tuples(st.floats(0, 3), st.floats(0, 3), st.booleans(), st.booleans()), max_size=20),
    heartbeat=st.floats(0.1, 2.0),
    lease_seconds=st.floats(0.5, 20.0),
    skew=st.floats(-1e6, 1e6),
)
def test_a_host_gives_up_before_the_coordinator_does(
    delays: list[tuple[float, float, bool, bool]], heartbeat: float, lease_seconds: float, skew: float
) -> None:
    """Messages and answers are late or lost, each for itself; the two clocks have nothing in common."""
    lease = Lease(FailureConfig(lease_seconds=lease_seconds, heartbeat_seconds=heartbeat), skew)
    heard = 0.0  # by the coordinator; the host connects at 0
    for number, (there, back, arrives, is_answered) in enumerate(delays):
        sent = number * heartbeat
        if arrives:
            heard = max(heard, sent + there)
            if is_answered and lease.left(sent + there + back + skew) > 0:
                lease.answered(sent + skew)
    over = lease.left(0.0)  # in the host's time
    assert over - skew < heard + lease_seconds + 1e-6 - 0.5 * min(3 * heartbeat, lease_seconds / 4)


@pytest.mark.parametrize(
    ("hosts", "limits", "expected"),
    [
        (1, {}, 0.5),
        (2000, {}, 0.5),
        (4000, {}, 1.0),
        (10_000, {}, 2.5),
        (100_000, {}, 2.5),  # four in a lease
        (10_000, {"lease_seconds": 4.0}, 1.0),
        (10_000, {"hang_seconds": 2.0}, 0.5),
        (10_000, {"hang_seconds": 0.5, "heartbeat_seconds": 0.1}, 0.125),
        (10_000, {"heartbeat_seconds": 5.0}, 5.0),  # as it was asked for
    ],
)
def test_many_hosts_beat_less_often(hosts: int, limits: dict[str, float], expected: float) -> None:
    assert heartbeat_seconds(FailureConfig(**limits), hosts) == expected


@pytest.mark.slow
def test_a_host_beats_as_often_as_it_is_asked_to(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[float] = []
    hear = Coordinator._on_heartbeat

    def listen(self: Coordinator, host: HostRecord, message: Message) -> None:
        sent.append(message["sent"])
        hear(self, host, message)

    monkeypatch.setattr(Coordinator, "_on_heartbeat", listen)
    monkeypatch.setattr(lease_module, "_MOST_HEARTBEATS", 0.1)
    fixed = ("hosts.min=2", "hosts.max=2", "failure.heartbeat_seconds=0.05", "failure.lease_seconds=2")
    with LocalJob(make_job(corpus, tmp_path, "beats", *fixed)) as run:
        run.start_host("only", "a")
        run.wait(lambda status: len(sent) >= 5)
        assert not run.told("host_lost") and not run.told("host_silent")
    later = [after - before for before, after in itertools.pairwise(sent)][1:]  # the first waits for the first answer
    assert min(later) > 0.49
