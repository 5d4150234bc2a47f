"""What the coordinator knows of each host and of the generation that is running."""

from __future__ import annotations

import asyncio
import itertools
import time
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elastic_train.config.layout import Layout
from elastic_train.controller.formation import Formation
from elastic_train.controller.inventory import SnapshotSet
from elastic_train.controller.wire import Connection, Message
from elastic_train.data.consumed import add_digests, covered

if TYPE_CHECKING:
    from elastic_train.controller.restore_plan import RestorePlan


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

    def as_partner(self) -> Message:
        """What a host must know to send it copies."""
        return {"address": list(self.byte_address), "node": self.node}

    @property
    def ready(self) -> bool:
        return self.ready_since is not None

    @property
    def label(self) -> str:
        """Short name for people: number, node and pid."""
        return f"host {self.number} (node {self.node[:8]}, pid {self.pid})"


@dataclass(slots=True)
class Trouble:
    """Why a generation ended, as first seen."""

    kind: str
    """host_lost, host_silent, preemption, trainer_killed, trainer_crashed, trainer_exited, out_of_memory, straggler,
    hang, copy_failed, growth, start, or what ``trainer._error_kind`` calls it"""
    detail: str
    seen: float = field(default_factory=time.time)
    traceback: str | None = None
    happened: float | None = None
    """when it failed, where that was long before it was seen: the last sign of life"""
    ends: bool = False
    """the job must not go on after it"""
    hosts: tuple[HostRecord, ...] = ()
    """whom it names"""

    # An echo (a peer's connection error, the failed copy to a dead partner) must not hide the cause that arrives later.
    _ECHOES = ("peer", "copy_failed", "trainer_exited")

    @property
    def began(self) -> float:
        return self.seen if self.happened is None else self.happened

    @property
    def is_echo(self) -> bool:
        return self.kind in self._ECHOES


@dataclass(slots=True)
class Generation:
    """One membership and layout. ``members[rank]`` is the host of a rank."""

    number: int
    layout: Layout
    members: list[HostRecord]
    partners: list[list[HostRecord]]
    start_step: int
    cause: Trouble
    reason: str = ""
    """why it has this layout"""
    formed: float = field(default_factory=time.time)
    restored: dict[str, int] = field(default_factory=dict)
    """bytes read per kind of source, all ranks"""
    finished_step: int = 0
    first_step_at: float | None = None
    stepped: dict[int, dict[int, Message]] = field(default_factory=dict)
    """step -> rank -> what the trainer said of it"""
    restore: RestorePlan | None = None
    """what it was told to begin with"""
    troubles: list[Trouble] = field(default_factory=list)
    refusing: bool = False
    """Its checkpoint is being given up because a rank found it damaged; what other ranks say now changes nothing."""
    last_progress: float = field(default_factory=time.time)
    formation: Formation = field(init=False)
    _ranks: dict[int, int] = field(init=False)
    """host number -> rank"""
    _promised: dict[int, int] = field(default_factory=dict)
    """step -> images that there will be of it, copies included"""

    def __post_init__(self) -> None:
        self.formation = Formation(len(self.members), self.cause.began, self.cause.seen, self.formed)
        self._ranks = {member.number: rank for rank, member in enumerate(self.members)}

    def rank_of(self, host: HostRecord) -> int | None:
        """None for a host that takes no part."""
        return self._ranks.get(host.number)

    def has(self, host: HostRecord) -> bool:
        """Whether it takes part."""
        return host.number in self._ranks

    def says(self, rank: int, message: Message) -> None:
        """``rank`` has done a step, and its host has promised copies of it. What was said before is no news."""
        step = message["step"]
        if rank in self.stepped.get(step, {}):
            return
        self.stepped.setdefault(step, {})[rank] = message
        self._promised[step] = self._promised.get(step, 0) + 1 + len(message["copies"])

    @property
    def newest_told(self) -> int:
        """The newest step that any rank has told of, as have some of all steps before: it can be logged."""
        step = self.finished_step
        while self.stepped.get(step + 1):
            step += 1
        return step

    def is_refused(self, step: int, rank: int, node: str) -> None:
        """``node`` takes no copy of a rank's step: it is done without."""
        said = self.stepped.get(step, {}).get(rank)
        if said is not None and node in said["copies"]:
            said["copies"].remove(node)
            self._promised[step] -= 1

    def is_finished(self, step: int) -> None:
        """``step`` is logged."""
        self.finished_step = step
        del self.stepped[step], self._promised[step]

    def holds(self, snapshots: SnapshotSet) -> bool:
        """Whether a step is whole on every rank and on every node that its host copies it to."""
        said, world = self.stepped.get(snapshots.step, {}), self.layout.world_size
        if len(said) < world or snapshots.images < self._promised[snapshots.step]:
            return False  # asked at every message, and nearly always this says it
        return all(snapshots.copies(rank) > len(said[rank]["copies"]) for rank in range(world))


def choose_partners(members: Sequence[HostRecord], count: int, full: Collection[str] = ()) -> list[list[HostRecord]]:
    """By rank up to ``count`` hosts, each on a different other node, for the copies of its snapshots.

    The next nodes in the ring of nodes take them, but those that are ``full``, and inside a node the host of the same
    position, so that the copies spread evenly.
    """
    nodes: dict[str, list[HostRecord]] = {}
    places = []
    for member in members:
        nodes.setdefault(member.node, []).append(member)
        places.append(len(nodes[member.node]) - 1)
    following = _following(list(nodes), count, set(full))
    return [
        [nodes[node][place % len(nodes[node])] for node in following[member.node]]
        for member, place in zip(members, places, strict=True)
    ]


def _following(ring: list[str], count: int, full: Collection[str]) -> dict[str, list[str]]:
    """node -> the next ``count`` others in the ring that are not full."""
    free = [place for place, node in enumerate(ring) if node not in full]
    found = {}
    for here, node in enumerate(ring):
        first = bisect_right(free, here)
        around = (free[(first + step) % len(free)] for step in range(len(free)))
        found[node] = [ring[place] for place in itertools.islice((place for place in around if place != here), count)]
    return found


def order_members(hosts: list[HostRecord], wanted: int, tensor: int = 1, spread: int = 1) -> list[HostRecord]:
    """The ``wanted`` hosts that take part, in rank order: fullest nodes first, the hosts of a node side by side.

    A node gives a multiple of ``tensor`` hosts, so that the tensor ranks, which are numbered side by side, share it.
    The fewest nodes are used, but ``spread`` of them if there are as many, for copies of snapshots live on other nodes.
    """
    nodes: dict[str, list[HostRecord]] = {}
    for host in sorted(hosts, key=lambda host: host.number):
        nodes.setdefault(host.node, []).append(host)
    groups = [group[: len(group) // tensor * tensor] for group in nodes.values()]
    ordered = sorted(filter(None, groups), key=lambda group: (-len(group), group[0].number))
    ordered = ordered[: max(_nodes_needed(ordered, wanted), spread)]
    members: list[HostRecord] = []
    for place, group in enumerate(ordered):
        later = tensor * (len(ordered) - place - 1)  # at least one tensor group for each
        left = wanted - len(members)
        members += group[: max(left - later, min(left, tensor))]
    return members


def _nodes_needed(groups: list[list[HostRecord]], wanted: int) -> int:
    """How many of the first ``groups`` together have ``wanted`` hosts."""
    sizes = itertools.accumulate(len(group) for group in groups)
    return next((count for count, size in enumerate(sizes, 1) if size >= wanted), len(groups))


def step_line(generation: Generation, step: int, samples: list[int] | None) -> dict[str, Any]:
    """The line of ``steps.jsonl`` for a finished step."""
    said = generation.stepped[step]
    first = said[min(said)]
    line: dict[str, Any] = {key: first[key] for key in ("step", "loss", "grad_norm", "lr", "valid_tokens")}
    if "skipped" in first:
        line |= {"skipped": True, "detail": first["skipped"]}
    evaluation = {key: first[key] for key in ("eval_loss", "eval_loss_ema") if key in first}
    if evaluation:
        line |= evaluation | {"eval_seconds": max(message["eval_seconds"] for message in said.values())}
    line["seconds"] = max(message["seconds"] for message in said.values())
    line["snapshot_seconds"] = max(message["snapshot_seconds"] for message in said.values())
    line["stall_seconds"] = max(message["stall_seconds"] for message in said.values())
    line["data_seconds"] = max(message["data_seconds"] for message in said.values())
    line |= _consumed(generation.layout, said)
    line |= {"generation": generation.number, "layout": str(generation.layout), "time": time.time()}
    if samples is not None:
        line["samples"] = samples
    return line


def _consumed(layout: Layout, said: Mapping[int, Message]) -> dict[str, Any]:
    """What the step was trained on, by the word of one rank of each data rank: all of its ranks read the same.

    Nothing when no rank of one could say it: a step is whole with its images, and words may be lost with a connection.
    """
    words = {layout.data_rank(rank): message for rank, message in said.items()}
    if len(words) < layout.data_ranks:
        return {}
    told = words.values()
    return {
        "slots": covered(message["slots"] for message in told),
        "batch": add_digests(message["batch"] for message in told),
    }
