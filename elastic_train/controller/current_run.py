"""One run of a job as it stands: who is there, how far it is, what is in memory. The coordinator's parts share it."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.controller.checkpointer import Checkpointer
from elastic_train.controller.generation import Generation
from elastic_train.controller.inventory import Inventory
from elastic_train.controller.job_folder import JobFolder
from elastic_train.controller.membership import Membership
from elastic_train.controller.step_log import StepLog
from elastic_train.controller.time_account import TimeAccount
from elastic_train.controller.wire import Message

Listener = Callable[[dict[str, Any]], None]


class State(StrEnum):
    """Where the job is."""

    STARTING = "starting"  # hosts are coming
    RETURNING = "returning"  # the coordinator had died and hears what the hosts have done meanwhile
    WAITING = "waiting"  # fewer hosts than the job needs
    FORMING = "forming"  # a generation has been assigned and has not finished a step yet
    RUNNING = "running"
    FINISHING = "finishing"  # the last checkpoint is being written
    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"  # stopped by the user

    @property
    def computes(self) -> bool:
        """There is a generation whose trainers are at work, or about to be."""
        return self in (State.FORMING, State.RUNNING)

    @property
    def ended(self) -> bool:
        return self in (State.FINISHED, State.FAILED, State.KILLED)

    @property
    def ending(self) -> bool:
        """No further step will be finished."""
        return self == State.FINISHING or self.ended


class CurrentRun:
    """What the parts of one coordinator share. It decides nothing; each part says what it changes here.

    Args:
        on_event: called with each line of the ledger and, as ``{"event": "step", ...}``, of the steps.
    """

    def __init__(self, job: Job, on_event: Listener) -> None:
        self.job = job
        self.state = State.STARTING
        self.message = ""
        """what the job waits for, or why it has ended"""
        self.traceback: str | None = None
        """of the trainer whose error has ended the job"""
        self.generation: Generation | None = None
        """the one that computes; None while there is none"""
        self.generation_count = 0
        """the highest number that any generation of the job has had"""
        self.layouts: dict[int, Layout] = {}
        """of this run's generations, by number"""
        self._on_event = on_event
        self.folder = JobFolder(job)
        self.members = Membership(self.record)
        self.log = StepLog(self.folder, on_event, self.record)
        self.inventory = Inventory()
        self.checkpointer = Checkpointer(job, self.folder, self.inventory, self.members.by_node)
        self.time = TimeAccount()
        self._accounted = time.monotonic()

    @property
    def computing(self) -> Generation | None:
        """The generation whose trainers are at work, or about to be."""
        return self.generation if self.state.computes else None

    @property
    def is_done(self) -> bool:
        """The last step of the job is finished."""
        return self.log.finished_step >= self.job.training.steps

    def open_generation(self, number: int, layout: Layout) -> None:
        """There is a generation of this number: its images count from now on."""
        self.generation_count = max(number, self.generation_count)
        self.layouts[number] = layout
        self.inventory.open_generation(number, layout.world_size)

    def record(self, event: str, **fields: Any) -> None:
        """Write an event to the ledger."""
        self._on_event(self.folder.record(event, **fields))

    def decide(self, **decision: Any) -> None:
        """Journal it, with the right by which it is made: what a superseded coordinator decides is nothing."""
        claim = self.checkpointer.claim
        assert claim is not None
        self.folder.decide(claim=claim.number, **decision)

    def account(self, after_seconds: float = 0.0) -> None:
        """Let the ledger say where the hosts' time went so far, unless it has within the last ``after_seconds``."""
        if time.monotonic() - self._accounted < after_seconds:
            return
        self._accounted = time.monotonic()
        if (account := self.time.report())["host_seconds"]:
            self.record("time_account", step=self.log.finished_step, **account)

    def progress(self, kind: str, generation: int) -> Message:
        """How far the job is, as a message ``kind`` for the hosts."""
        step, stored = self.log.finished_step, self.log.stored_step
        return {"type": kind, "generation": generation, "step": step, "stored": stored}
