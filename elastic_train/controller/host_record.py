"""What the coordinator knows of a host."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from elastic_train.controller.wire import Connection, Message
from elastic_train.planner.machines import Told


@dataclass(slots=True, eq=False)
class HostRecord:
    """One connected host."""

    number: int
    connection: Connection
    pid: int
    node: str
    address: str
    byte_address: tuple[str, int]
    pool: str
    joined: float
    told: Told = field(default_factory=Told)
    """what its machine is"""
    ready_since: float | None = None
    trainer_pid: int | None = None
    beats: int = 0
    started_step: int = 0
    silent: bool = False
    """not heard for as long as a lease: its connection was ended by us"""
    leaving: bool = False
    """Its node is being taken away: it is no member of a generation that is formed from now on."""
    beats_since: float = 0.0
    """when its trainer was last seen to go on"""
    process: str = ""
    """state of its trainer's process, as in /proc"""
    slow: bool = False
    """was replaced as a straggler"""
    left_out: str = ""
    """why it takes no part until ``left_out_until``"""
    left_out_until: float = 0.0
    suspected_until: float = 0.0
    """generations came to nothing, and it was named most often"""

    @property
    def usable(self) -> bool:
        """May be a member of the next generation."""
        return self.ready and not self.leaving and time.time() >= self.left_out_until

    @property
    def full(self) -> bool:
        """Its node has no room for its snapshots."""
        return self.ready and not self.leaving and not self.usable

    @property
    def suspected(self) -> bool:
        return time.time() < self.suspected_until

    @property
    def doubtful(self) -> bool:
        """A member only when there are too few others."""
        return self.slow or self.suspected

    def last_word(self, lease_seconds: float) -> float | None:
        """When it was last heard, if that is a lease ago; None: its connection was closed, which is told at once."""
        silence = asyncio.get_running_loop().time() - self.connection.last_heard
        return time.time() - silence if silence >= lease_seconds else None

    def as_partner(self, needed: bool) -> Message:
        """What a host must know to send it copies; ``needed``: one that it cannot send ends the generation."""
        return {"address": list(self.byte_address), "node": self.node, "needed": needed}

    @property
    def ready(self) -> bool:
        return self.ready_since is not None

    @property
    def label(self) -> str:
        """Short name for people: number, node and pid."""
        return f"host {self.number} (node {self.node[:8]}, pid {self.pid})"
