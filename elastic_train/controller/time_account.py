"""Where the time of a run's hosts goes: every second of every host has exactly one cause.

The members of a generation share a timeline (a step, then detection, teardown, form, restore, first step, a step ...);
everybody else waits for one reason. A host's time is charged piece by piece, each piece from where the last one ended,
so that the causes add up to the seconds for which hosts were connected, whatever happens in between.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from elastic_train.config.time_causes import Cause
from elastic_train.controller.timeline import STEP, Spent, Timeline

_RECENT_STEPS = 20


class TimeAccount:
    """Of one run. Hosts are known by number; moments are Unix seconds, those of ``clock`` unless given.

    Total is the sum over hosts of the time they were connected: hosts that are missing have no time. ``goodput`` is the
    useful part of it.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._spent: Spent = defaultdict(float)
        self._outside: dict[int, float] = {}
        """host that takes no part in the generation -> from when on its time is not charged yet"""
        self._members: dict[int, float] = {}
        self._ready: set[int] = set()
        self._idle = Cause.START
        """why hosts that are ready take no part"""
        self._timeline = Timeline(clock(), Cause.START)
        self._starts = False
        """the first generation is being formed"""
        self._finished = self._furthest = 0
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._began = self._known_until = clock()
        """the run's begin, and until when an earlier coordinator of it had accounted"""
        self._back: set[int] = set()
        """hosts whose time since then is charged"""

    # -- hosts ---------------------------------------------------------------------------------------------------

    def joined(self, host: int, *, back: bool = False) -> None:
        """A host is connected; it counts from now on, or was there all the time and is ``back``."""
        self._outside[host] = self._known_until if back and host not in self._back else self._clock()
        if back:
            self._back.add(host)
            self._ready.add(host)

    def ready(self, host: int) -> None:
        """It could train from now on."""
        if host in self._outside and host not in self._ready:
            self._charge_outside(host, self._clock())
        self._ready.add(host)

    def left(self, host: int) -> None:
        """Its connection has ended; if that is a failure, ``failed`` was told before."""
        now = self._clock()
        if host in self._members:
            _add(self._spent, self._timeline.spent(self._members.pop(host), now))
        else:
            self._charge_outside(host, now)
            del self._outside[host]
        self._ready.discard(host)

    def _charge_outside(self, host: int, until: float) -> None:
        self._spent[self._cause_outside(host)] += max(until - self._outside[host], 0.0)
        self._outside[host] = until

    def _cause_outside(self, host: int) -> Cause:
        return self._idle if host in self._ready or self._idle == Cause.FINISHING else Cause.START

    # -- generations ---------------------------------------------------------------------------------------------

    def resumed(self, step: int, to_repeat: int) -> None:
        """The job goes on from ``step``; an earlier run had finished that many more."""
        self._finished, self._furthest = step, step + to_repeat

    def returned(self, account: Mapping[str, Any] | None) -> None:
        """The coordinator comes back within a run; its last ``time_account`` is gone on from."""
        if account is not None:
            _add(self._spent, account["seconds"])
            self._known_until = account["time"]
            self._began = account["time"] - account["wall_seconds"]
        self._idle = Cause.DETECTION

    def adopted(self, members: Iterable[int], step: int, skipped_seconds: float = 0.0) -> None:
        """All members have stepped on while the coordinator was away, up to ``step``.

        ``skipped_seconds``: what those of the steps took that were left out; when that was is of no matter.
        """
        self._finished, self._furthest = step, max(step, self._furthest)
        self._members = {host: self._outside.pop(host) for host in members}
        self._settle_outside(self._clock())
        self._idle, self._timeline = Cause.IDLE_SPARE, Timeline(self._known_until, Cause.SKIPPED)
        self._timeline.enter(STEP, min(self._known_until + skipped_seconds, self._clock()))

    def formed(self, members: Iterable[int], step: int, *, starts: bool = False, skipped: bool = False) -> None:
        """The next generation is assigned and will go on from ``step``; ``starts``: it is the first of the run.

        ``skipped``: ``step`` was left out.
        """
        now = self._clock()
        if step > self._finished:  # whole everywhere, only the news was missing
            self._timeline.step_was(self._work(step, skipped))
        self._settle(now)
        self._finished, self._furthest = step, max(step, self._furthest)
        self._members = {host: self._outside.pop(host) for host in members}
        self._idle, self._starts = Cause.IDLE_SPARE, starts
        self._timeline = Timeline(now, Cause.START if starts else Cause.TEARDOWN)

    def enter(self, cause: Cause) -> None:
        """The generation that is being formed has come so far on all ranks."""
        if not self._starts:
            self._timeline.enter(cause, self._clock())

    def failed(self, happened: float, seen: float) -> None:
        """The generation has ended."""
        self._timeline.failed(happened, seen)

    def waiting(self) -> None:
        """There is no generation for now."""
        self._pause(Cause.WAITING)

    def finishing(self) -> None:
        """No step will be computed any more."""
        self._pause(Cause.FINISHING)

    def end(self) -> None:
        """Time stops."""
        now = self._clock()
        self._clock = lambda: now

    def _pause(self, cause: Cause) -> None:
        self._settle(self._clock())
        self._idle = cause

    def _settle(self, now: float) -> None:
        """Charge everybody's time, after which nobody is a member."""
        for since, hosts in Counter(self._members.values()).items():
            _add(self._spent, self._timeline.spent(since, now), hosts)
        self._settle_outside(now)
        self._outside |= dict.fromkeys(self._members, now)
        self._members = {}

    def _settle_outside(self, now: float) -> None:
        for host in self._outside:
            self._charge_outside(host, now)

    # -- steps ---------------------------------------------------------------------------------------------------

    def step_finished(self, step: int, said: Mapping[int, Mapping[str, Any]]) -> None:
        """A step is finished; ``said``: by host what its trainer told of it (``stepped``), times in seconds.

        A usual step has the whole time since the one before. Of a generation's first step what its trainer took to
        compute it is work, but no more than a usual step takes, and the rest is overhead.
        """
        work = self._work(step, any("skipped" in told for told in said.values()))
        self._finished, self._furthest, self._starts = step, max(step, self._furthest), False
        if self._timeline.has_failed:  # the last news of it came after that of the failure
            self._timeline.step_was(work)
        else:
            self._charge_step(work, said)

    def _work(self, step: int, skipped: bool = False) -> Cause:
        if step <= self._furthest:
            return Cause.REPLAYED
        return Cause.SKIPPED if skipped else Cause.USEFUL

    def _charge_step(self, work: Cause, said: Mapping[int, Mapping[str, Any]]) -> None:
        now, what = self._clock(), self._timeline.now
        usual = statistics.median(self._recent) if self._recent else float("inf")
        pieces = {since: self._timeline.spent(since, now) for since in set(self._members.values())}
        for host, since in self._members.items():
            left, told = pieces[since][what], said[host]
            for cause, key in _PARTS.items():
                part = min(told[key], left)
                self._spent[cause] += part
                left -= part
            worked = left if what == STEP else min(told["seconds"], usual, left)
            self._spent[work] += worked
            self._spent[what] += left - worked  # of a usual step nothing
        for since, hosts in Counter(self._members.values()).items():
            _add(self._spent, {cause: each for cause, each in pieces[since].items() if cause != what}, hosts)
        self._members = dict.fromkeys(self._members, now)
        if what == STEP:
            self._recent.append(max(told["seconds"] for told in said.values()))
        self._timeline = Timeline(now, STEP)

    # -- report --------------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """So far: ``goodput`` (0 to 1), ``host_seconds`` in all, ``seconds`` by cause, ``hosts``, ``wall_seconds``.

        A step under way counts as if it will be finished.
        """
        now, spent = self._clock(), self._spent.copy()
        for since, hosts in Counter(self._members.values()).items():
            piece = self._timeline.spent(since, now)
            _add(spent, piece, hosts, step=self._work(self._finished + 1))
        for (cause, since), hosts in Counter((self._cause_outside(h), s) for h, s in self._outside.items()).items():
            spent[cause] += max(now - since, 0.0) * hosts
        seconds = {cause.value: spent[cause] for cause in Cause if spent[cause] > 0}
        hosts = len(self._members) + len(self._outside)
        return {**_summary(seconds), "hosts": hosts, "wall_seconds": now - self._began}


_PARTS = {
    Cause.CHECKPOINT_STALL: "stall_seconds",
    Cause.DATA_WAIT: "data_seconds",
    Cause.EVALUATION: "eval_seconds",
}


def _add(into: Spent, spent: Spent, hosts: int = 1, step: Cause = Cause.LOST_STEP) -> None:
    """Add what each of some hosts has spent; ``step``: what a step that is under way counts as."""
    for what, seconds in spent.items():
        into[step if what == STEP else what] += seconds * hosts


def _summary(seconds: Mapping[str, float]) -> dict[str, Any]:
    total = sum(seconds.values())
    goodput = seconds.get(Cause.USEFUL, 0.0) / total if total else 0.0
    return {"goodput": goodput, "host_seconds": total, "seconds": dict(seconds)}


def account_of_runs(ledger: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """``goodput``, ``host_seconds`` and ``seconds`` of all runs of a job, from its ledger; None without any.

    Each run counts up to its last word. Steps that a later run had to repeat are its ``replayed`` ones.
    """
    runs: list[Spent] = []
    last: Spent = {}
    for line in ledger:
        if line.get("event") == "job_started":
            runs.append(last)
            last = {}
        elif line.get("event") == "time_account":
            last = line["seconds"]
    total: Spent = defaultdict(float)
    for seconds in [*runs, last]:
        _add(total, seconds)
    return _summary(total) if total else None


def largest_causes(account: Mapping[str, Any], count: int = 3) -> str:
    """What kept hosts from useful work most, as shares of all their time: ``start 4.1 %, detection 1.0 %``."""
    seconds = {cause: spent for cause, spent in account["seconds"].items() if cause != Cause.USEFUL}
    largest = sorted(seconds, key=lambda cause: -seconds[cause])[:count]
    shares = {cause: 100 * seconds[cause] / account["host_seconds"] for cause in largest}
    return ", ".join(f"{cause.replace('_', ' ')} {share:.1f} %" for cause, share in shares.items() if share >= 0.05)
