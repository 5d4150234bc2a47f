"""Hosts that have come: enough to start or to go on after a wait, or worth a pause of those that run."""

from __future__ import annotations

import time

from elastic_train.controller.current_run import CurrentRun, State
from elastic_train.controller.forming import Forming
from elastic_train.controller.generation import Generation
from elastic_train.controller.growth import Growth
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.trouble import Trouble


class Newcomers:
    """Decides when hosts that have come are taken in."""

    def __init__(self, run: CurrentRun, forming: Forming, growth: Growth) -> None:
        self._run, self._forming, self._growth = run, forming, growth
        self._enough_since: float | None = None
        """while waiting: since when there have been enough hosts (monotonic clock)"""

    def look(self) -> None:
        """Form a generation if it is time, or let one be formed at the next finished step."""
        run = self._run
        if run.state == State.STARTING:
            self._start()
        elif run.state == State.WAITING:
            self._go_on()
        elif run.state == State.RUNNING and run.generation is not None:
            hosts = (host for host in run.members.usable() if not host.doubtful)
            settled = [host for host in hosts if self._settled(run.generation, host)]
            self._growth.consider(self._forming.choice(settled), run.log.finished_step)

    def _start(self) -> None:
        limits, members = self._run.job.hosts, self._run.members
        ready, first = members.ready_count(), members.first_ready
        waited = first is not None and time.time() - first >= limits.start_wait_seconds
        if ready >= limits.max or (waited and ready >= limits.min):
            self._forming.form(Trouble("start", f"{ready} hosts are ready"))

    def _go_on(self) -> None:
        forming, hosts, now = self._forming, self._run.members.usable(), time.monotonic()
        if now < forming.resume_at:
            return
        if forming.choice(hosts) is None:
            self._enough_since = None
            return
        self._enough_since = self._enough_since or now
        if not self._more_may_come(hosts, now - self._enough_since):
            self._enough_since = None
            paused_for = forming.paused_for
            back = Trouble("growth", "enough hosts are back")
            forming.form(back if paused_for is None else Trouble(paused_for, "trying again"))

    def _more_may_come(self, hosts: list[HostRecord], waited: float) -> bool:
        """Hosts have just come, and with what they have in memory the job would be set back: others may have it."""
        newest = max((host.ready_since or 0.0 for host in hosts), default=0.0)
        job = self._run.job
        if time.time() - newest >= job.hosts.settle_seconds or waited >= job.failure.lease_seconds:
            return False
        return self._forming.restorable().step < self._run.log.finished_step

    def _settled(self, generation: Generation, host: HostRecord) -> bool:
        waited = time.time() - (host.ready_since or 0.0)
        return generation.has(host) or waited >= self._run.job.hosts.settle_seconds
