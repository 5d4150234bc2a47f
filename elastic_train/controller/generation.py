"""What the coordinator knows of a generation, and the line of a step that it has finished."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_train.config.layout import Layout
from elastic_train.controller.formation import Formation
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.inventory import SnapshotSet
from elastic_train.controller.restore_plan import RestorePlan
from elastic_train.controller.trouble import Trouble
from elastic_train.controller.wire import Message
from elastic_train.data.consumed import add_digests, covered


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
    _nodes: set[str] = field(init=False)
    """where its members are"""
    _promised: dict[int, int] = field(default_factory=dict)
    """step -> images that there will be of it, copies included"""

    def __post_init__(self) -> None:
        self.formation = Formation(len(self.members), self.cause.began, self.cause.seen, self.formed)
        self._nodes = {member.node for member in self.members}
        self._ranks = {member.number: rank for rank, member in enumerate(self.members)}

    def rank_of(self, host: HostRecord) -> int | None:
        """None for a host that takes no part."""
        return self._ranks.get(host.number)

    def is_on(self, node: str) -> bool:
        """Whether a member is on ``node``: without it, it cannot go on."""
        return node in self._nodes

    def has(self, host: HostRecord) -> bool:
        """Whether it takes part."""
        return host.number in self._ranks

    def told_partners(self, rank: int) -> list[Message]:
        """As the host of ``rank`` is told of its partners; it can do without those that take no part."""
        return [partner.as_partner(needed=self.has(partner)) for partner in self.partners[rank]]

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
        """``node`` takes no copy of a rank's step, or cannot: it is done without."""
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
