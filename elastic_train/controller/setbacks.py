"""What a setback means for the next generation: whether it ends the job, who is left out, and how long to wait."""

from __future__ import annotations

import time
from collections.abc import Callable

from elastic_train.controller.generation import Generation
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.trouble import Trouble
from elastic_train.controller.wire import Message

ROOM_SECONDS = 60.0
"""A node whose memory file system is full is tried again after this; each further time after twice as long."""
STORAGE_SECONDS = 1.0
LONGEST_SECONDS = 3600.0
_COUNTED = ("exception", "trainer_crashed", "out_of_memory")
"""The same again would lead to the same again."""
LONGEST_STORAGE_SECONDS = 60.0


def how_it_ended(host: HostRecord, message: Message) -> Trouble:
    """What the end of a trainer's process is: SIGKILL comes from outside, other signals from its own faults.

    A trainer that exits has said why before.
    """
    said = f"rank {message['rank']} on {host.label} ended: {message['cause']}"
    if message["out_of_memory"] is not None:
        return Trouble("out_of_memory", f"{said}, {message['out_of_memory']}")
    if message["cause"] == "SIGKILL":
        return Trouble("trainer_killed", said)
    kind = "trainer_crashed" if message["cause"].startswith("SIG") else "trainer_exited"
    return Trouble(kind, said, hosts=(host,))


def what_it_said(host: HostRecord, message: Message) -> Trouble:
    """The error that a trainer has told of before it ended."""
    detail = f"rank {message['rank']}, step {message['step']}, {host.label}: {message['error']}"
    return Trouble(message["kind"], detail, traceback=message["traceback"], hosts=(host,))


class Pause:
    """Seconds to wait before something is tried again: twice as long each time."""

    def __init__(self, first: float = ROOM_SECONDS, longest: float = LONGEST_SECONDS) -> None:
        self._seconds, self._longest = first, longest

    def next(self) -> float:
        seconds = self._seconds
        self._seconds = min(2 * seconds, self._longest)
        return seconds


class Setbacks:
    """What has gone wrong since a step was last finished.

    Args:
        max_errors: ``failure.max_errors``.
        record: writes an event to the ledger.
    """

    def __init__(self, max_errors: int, record: Callable[..., None]) -> None:
        self._max_errors, self._record = max_errors, record
        self._rooms: dict[int, Pause] = {}
        self._without: dict[str, tuple[int, float]] = {}
        """node -> generation whose member on it was left out last, and until when"""
        self.step_finished()

    def step_finished(self) -> None:
        self._errors = 0
        self._storage = Pause(STORAGE_SECONDS, LONGEST_STORAGE_SECONDS)

    def reason_to_end(self, cause: Trouble) -> str | None:
        """A sentence when ``cause`` ends the job, or has come too often in a row.

        Only what may come back for ever counts; a host or node that is lost, or a kill from outside, never does.
        """
        if cause.ends:
            return cause.detail
        if cause.kind not in _COUNTED:
            return None
        self._errors += 1
        return f"{cause.detail} ({self._errors} times in a row)" if self._errors >= self._max_errors else None

    def storage_pause(self) -> float:
        """Seconds until storage, which did not answer, is asked again."""
        return self._storage.next()

    def no_room(self, host: HostRecord, generation: Generation, sentence: str) -> None:
        """Leave out a host whose node has no memory left for its snapshots; one per node, for that gives room."""
        now = time.time()
        number, until = self._without.get(host.node, (0, 0.0))
        if number == generation.number and until > now:
            return
        seconds = self._rooms.setdefault(host.number, Pause()).next()
        host.left_out, host.left_out_until = sentence, now + seconds
        self._without[host.node] = generation.number, host.left_out_until
        self._record("no_room", host=host.number, node=host.node, retry_seconds=seconds, detail=sentence)
