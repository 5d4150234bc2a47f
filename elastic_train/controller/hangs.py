"""A generation that makes no progress, and whom it waits for: by what the heartbeats tell of each trainer."""

from __future__ import annotations

from elastic_train.controller.generation import Generation
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.trouble import Trouble

_STOPPED = "Tt"
"""States of a process in /proc: stopped by a signal, or by a debugger."""
_BLOCKED = "D"


def hang(generation: Generation, now: float, seconds: float) -> Trouble | None:
    """The trouble of a generation in which nobody has gone on for more than ``seconds``; ``now`` as in ``culprit``."""
    still = now - generation.last_progress
    if still <= seconds:
        return None
    told, ranks = culprit(generation, now)
    hosts = tuple(generation.members[rank] for rank in ranks)
    detail = f"no rank made progress for {still:.1f} s: {told}"
    return Trouble("hang", detail, happened=generation.last_progress, hosts=hosts)


def culprit(generation: Generation, now: float) -> tuple[str, list[int]]:
    """A sentence that names the ranks, and these; or says that none stands out. ``now`` in seconds since the epoch."""
    stopped = [rank for rank, member in enumerate(generation.members) if member.process in _STOPPED and member.process]
    if stopped:
        return "; ".join(f"{_named(generation, rank)}: its process is stopped" for rank in stopped), stopped
    if (late := _late(generation)) is not None:
        rank, ahead = late
        member = generation.members[rank]
        since = now - max(member.beats_since, generation.formed)
        told = (
            f"{_named(generation, rank)} has not entered the collective its peers wait in: step {member.started_step}, "
            f"beat {member.beats} for {since:.1f} s, a peer is at step {ahead.started_step}, beat {ahead.beats}"
        )
        return told, [rank]
    blocked = [rank for rank, member in enumerate(generation.members) if member.process == _BLOCKED]
    if blocked:
        named = (f"{_named(generation, rank)}: its process is blocked in the kernel" for rank in blocked)
        return "; ".join(named), blocked
    return "no rank is behind the others", []


def _named(generation: Generation, rank: int) -> str:
    return f"rank {rank} on {generation.members[rank].label}"


def _late(generation: Generation) -> tuple[int, HostRecord] | None:
    """The rank that is furthest behind, and the peer that is furthest ahead of it.

    Ranks of one stage run the same blocks in the same order, so they are compared by beats; other stages by steps.
    """
    stages: dict[int, list[int]] = {}
    for rank in range(len(generation.members)):
        stages.setdefault(generation.layout.coordinates(rank).pp, []).append(rank)
    members = generation.members
    for ranks in stages.values():
        first, last = (pick(ranks, key=lambda rank: _place(members[rank])) for pick in (min, max))
        if _place(members[first]) < _place(members[last]):
            return first, members[last]
    everyone = range(len(members))
    first, last = (pick(everyone, key=lambda rank: members[rank].started_step) for pick in (min, max))
    return (first, members[last]) if members[first].started_step < members[last].started_step else None


def _place(member: HostRecord) -> tuple[int, int]:
    return member.started_step, member.beats
