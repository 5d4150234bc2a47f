"""One run, event by event: a failure, a host that comes or is ready, the end of a pause."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial

from elastic_train.config.faults import NODE_KINDS, Kind
from elastic_train.config.time_causes import Cause
from elastic_train.planner.simulation.account import Account
from elastic_train.planner.simulation.cluster import Cluster
from elastic_train.planner.simulation.failures import Failure
from elastic_train.planner.simulation.progress import Kept, Progress, Stretch
from elastic_train.planner.simulation.scenario import Outcome, Scenario
from elastic_train.planner.simulation.throughput import Share


class _Mode(Enum):
    """What the job does."""

    PAUSED = auto()  # a generation is being formed
    RUNNING = auto()
    WAITING = auto()  # too few hosts


def simulate(scenario: Scenario, seed: int = 1, *, history: bool = False) -> Outcome:
    """A run of ``scenario`` with the failures that ``seed`` draws. ``history``: with the moments for a picture."""
    failures = scenario.failures.draw(scenario.places, scenario.duration, seed)
    return replay(scenario, failures, history=history)


def replay(scenario: Scenario, failures: Sequence[Failure], *, history: bool = False) -> Outcome:
    """A run in which just these ``failures`` happen, in the order of time."""
    return _Run(scenario, failures, Account(history=history)).outcome()


class _Run:
    def __init__(self, scenario: Scenario, failures: Sequence[Failure], account: Account) -> None:
        self._scenario, self._failures, self._account = scenario, failures, account
        self._cluster = Cluster(scenario.places, scenario.hosts_per_node)
        self._progress = Progress(scenario.save_steps, scenario.saves.stall, scenario.saves.seconds)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = self._since = 0.0
        """the present; until when the members' time is charged"""
        self._mode = _Mode.PAUSED
        self._parts: list[tuple[Cause, float]] = []
        """of the pause, each with its end"""
        self._pause_number = 0
        self._share = Share(0, 0.0)
        self._kept = Kept()
        self._kind: Kind | None = None
        """of the failure for which the job is recovering; None: it takes hosts in"""
        self._from_storage = False
        """the state is being read from there"""
        self._useful_time = 0.0
        self._elapsed = dict.fromkeys(_Mode, 0.0)
        self._events = self._interruptions = self._fallbacks = self._steps_lost = 0

    def outcome(self) -> Outcome:
        end = self._scenario.duration
        self._begin()
        for failure in self._failures:
            self._at(failure.at, partial(self._fail, failure))
        while self._queue and self._queue[0][0] < end:
            at, _, act = heapq.heappop(self._queue)
            self._pass_time(at)
            self._events += 1
            act()
        self._pass_time(end)
        self._end()
        step = self._scenario.pace.step
        return Outcome(
            seconds=dict(self._account.seconds),
            ettr=self._useful_time / end,
            progress=self._progress.furthest * step / end,
            running=self._elapsed[_Mode.RUNNING],
            waiting=self._elapsed[_Mode.WAITING] / end,
            steps=self._progress.furthest,
            failures=len(self._failures),
            interruptions=self._interruptions,
            from_storage=self._fallbacks,
            steps_lost=self._steps_lost,
            events=self._events,
            moments=self._account.moments,
        )

    def _at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (time, next(self._order), act))

    def _begin(self) -> None:
        self._account.note(0.0)
        share = self._scenario.throughput(self._cluster.sizes)
        if share is None:
            self._wait()
            return
        self._pause(share, [(Cause.START, self._scenario.start)])

    def _end(self) -> None:
        self._keep(self._close())
        again = self._progress.finished < self._progress.furthest
        self._spend_kept(Cause.REPLAYED if again else Cause.USEFUL)  # a step under way counts as finished
        hosts = self._cluster.ready + self._cluster.starting
        self._account.charge(Cause.FINISHING, self._scenario.finish * hosts)
        self._account.note(self._scenario.duration + self._scenario.finish)

    # -- time ----------------------------------------------------------------------------------------------------

    def _pass_time(self, until: float) -> None:
        """Charge those that take no part; members are charged when what they do is known."""
        seconds, cluster = until - self._now, self._cluster
        self._account.charge(self._idle_cause(), seconds * (cluster.ready - cluster.used))
        self._account.charge(Cause.START, seconds * cluster.starting)
        self._now = until

    def _idle_cause(self) -> Cause:
        if self._mode is _Mode.WAITING:
            return Cause.WAITING
        starts = bool(self._parts) and self._parts[0][0] is Cause.START
        return Cause.START if starts and self._mode is _Mode.PAUSED else Cause.IDLE_SPARE

    def _close(self) -> Stretch | None:
        """Charge the members until now; returns what a stretch of work has come to."""
        stretch = None
        self._elapsed[self._mode] += self._now - self._since
        if self._mode is _Mode.RUNNING:
            stretch = self._work()
        elif self._mode is _Mode.PAUSED:
            for cause, end in self._parts:
                until = max(min(end, self._now), self._since)
                self._account.charge(cause, (until - self._since) * self._share.hosts)
                self._since = until
        self._since = self._now
        self._account.note(self._now)
        return stretch

    @property
    def _step(self) -> float:
        return self._scenario.pace.step / self._share.speed

    def _work(self) -> Stretch:
        step, kept = self._step, self._kept.fraction * self._step
        stretch = self._progress.work(self._since, self._now, step, kept)
        if stretch.new or stretch.replayed:
            first = Cause.REPLAYED if stretch.replayed else Cause.USEFUL
            self._charge_step(first, -kept)  # was computed before
            self._spend_kept(first)
        self._charge_step(Cause.USEFUL, stretch.new * step)
        self._charge_step(Cause.REPLAYED, stretch.replayed * step)
        self._account.charge(Cause.CHECKPOINT_STALL, stretch.stall * self._share.hosts)
        return stretch

    def _keep(self, stretch: Stretch | None) -> None:
        """The step under way goes on after the pause."""
        if stretch is not None:
            fresh = stretch.unfinished - self._kept.fraction * self._step
            self._kept.seconds += fresh
            self._kept.host_seconds += fresh * self._share.hosts
            self._kept.fraction = stretch.unfinished / self._step

    def _spend_kept(self, cause: Cause) -> None:
        """What became of the step that was kept."""
        beside = {} if cause is Cause.LOST_STEP else self._scenario.pace.beside
        self._account.step(cause, self._kept.host_seconds, beside)
        self._useful_time += self._kept.seconds if cause is Cause.USEFUL else 0.0
        self._kept = Kept()

    def _charge_step(self, cause: Cause, seconds: float) -> None:
        self._account.step(cause, seconds * self._share.hosts, self._scenario.pace.beside)
        self._useful_time += seconds if cause is Cause.USEFUL else 0.0

    # -- failures ------------------------------------------------------------------------------------------------

    def _fail(self, failure: Failure) -> None:
        cluster, scenario = self._cluster, self._scenario
        victims = cluster.victims(failure)
        if not victims or failure.kind not in scenario.costs.pauses:
            return
        hit = any(victim.is_member for victim in victims) and self._mode is not _Mode.WAITING
        in_order = self._leaves_in_order(failure)
        if hit:
            self._interruptions += 1
            self._interrupt(keep_step=in_order)
        for victim in victims:
            self._break(failure, victim.place, in_order=in_order)
        if in_order and (self._mode is _Mode.WAITING or scenario.throughput(cluster.sizes) is None):
            self._progress.save()  # while the node is still there
        lost = cluster.state_is_lost(scenario.tiers.partners) if scenario.tiers.memory else hit
        if lost:
            self._fall_back(keep_step=in_order)
        if lost and self._mode is _Mode.PAUSED and not hit:  # it was to be read from a node that the job had left
            self._interruptions += 1
            self._close()
            hit = True
        if hit:
            self._form(failure.kind)

    def _leaves_in_order(self, failure: Failure) -> bool:
        """Whether the notice is long enough to finish the step and to hand the state on."""
        if failure.kind != Kind.DRAIN or not self._scenario.tiers.memory:
            return False
        pause = self._scenario.costs.of(failure.kind, self._share.hosts, from_storage=False)
        step = 0.0 if self._mode is _Mode.WAITING else self._step
        return failure.seconds >= step + pause.total

    def _interrupt(self, *, keep_step: bool) -> None:
        self._keep(self._close())
        if not keep_step:
            self._spend_kept(Cause.LOST_STEP)

    def _break(self, failure: Failure, place: int, *, in_order: bool) -> None:
        """Take away what is broken, and let it come back."""
        scenario, cluster = self._scenario, self._cluster
        if failure.kind in NODE_KINDS or failure.repair:
            at_once = failure.kind in NODE_KINDS and not in_order
            cluster.lose_node(place, memory=at_once)
            whole = failure.kind == Kind.PARTITION and not failure.repair
            repair = scenario.repair.seconds(failure.part) if failure.away is None else failure.away
            away = failure.seconds if whole else max(failure.seconds, repair)
            self._come_later(place, scenario.hosts_per_node, away)
        elif failure.kind == Kind.KILL_HOST:
            cluster.lose_host(place)
            self._come_later(place, 1, scenario.host_return)

    def _fall_back(self, *, keep_step: bool) -> None:
        self._steps_lost += self._progress.fall_back(self._now)
        if not keep_step:
            self._spend_kept(Cause.LOST_STEP)
        self._fallbacks += not self._from_storage
        self._from_storage = True
        self._cluster.forget()

    # -- forming -------------------------------------------------------------------------------------------------

    def _form(self, kind: Kind | None) -> None:
        """The next generation of the hosts that are ready, if they are enough."""
        self._kind = kind
        share = self._scenario.throughput(self._cluster.sizes)
        if share is None:
            self._wait()
            return
        pause = self._scenario.costs.of(kind, share.hosts, from_storage=self._from_storage)
        self._pause(share, list(pause.parts()))

    def _pause(self, share: Share, parts: list[tuple[Cause, float]]) -> None:
        self._mode, self._share, self._since = _Mode.PAUSED, share, self._now
        self._cluster.used = share.hosts
        ends = itertools.accumulate((seconds for _, seconds in parts), initial=self._now)
        next(ends)
        self._parts = [(cause, end) for (cause, _), end in zip(parts, ends, strict=True)]
        self._pause_number = number = self._pause_number + 1
        self._at(self._parts[-1][1], lambda: self._resume(number))

    def _wait(self) -> None:
        self._mode, self._since = _Mode.WAITING, self._now
        self._cluster.used = 0

    def _resume(self, number: int) -> None:
        if number != self._pause_number or self._mode is not _Mode.PAUSED:
            return  # another failure came in between
        self._close()
        self._mode, self._from_storage = _Mode.RUNNING, False
        self._cluster.running()
        self._grow()

    def _grow(self) -> None:
        """Take in those that came, if that is worth a pause."""
        scenario = self._scenario
        share = scenario.throughput(self._cluster.sizes)
        if share is None or share.estimate <= self._share.estimate * (1 + 1e-9) or not scenario.costs.pauses_to_grow:
            return
        pause = scenario.costs.of(None, share.hosts, from_storage=False)
        gain = scenario.growth.horizon * (1 - self._share.estimate / share.estimate)
        if gain > scenario.growth.margin * pause.total:
            self._interrupt(keep_step=True)
            self._form(None)

    # -- hosts that come -----------------------------------------------------------------------------------------

    def _come_later(self, place: int, hosts: int, seconds: float) -> None:
        age = self._cluster.age[place]
        self._at(self._now + seconds, lambda: self._come(place, hosts, age))

    def _come(self, place: int, hosts: int, age: int) -> None:
        if age != self._cluster.age[place]:
            return  # the node they were on is gone
        self._cluster.come(place, hosts)
        self._at(self._now + self._scenario.newcomer, lambda: self._ready(place, hosts, age))

    def _ready(self, place: int, hosts: int, age: int) -> None:
        if age != self._cluster.age[place]:
            return
        self._cluster.start(place, hosts)
        if self._mode is _Mode.WAITING:
            self._close()
            self._form(self._kind)
        elif self._mode is _Mode.RUNNING:
            self._grow()
