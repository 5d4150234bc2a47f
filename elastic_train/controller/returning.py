"""What a coordinator that has died finds when it comes back: its journal, and hosts whose trainers have stepped on.

``PastRun`` is what the journal says. ``Stories`` collects what the hosts tell (``story``), until it is clear whether
the generation that runs can be adopted as it is, or a new one has to be formed from what is in memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from elastic_train.config.layout import Layout
from elastic_train.controller.generation import Generation
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.inventory import Inventory
from elastic_train.controller.setbacks import how_it_ended, what_it_said
from elastic_train.controller.story import LAST_WORDS
from elastic_train.controller.trouble import Trouble
from elastic_train.controller.wire import Message
from elastic_train.planner.layouts import LayoutChoice

BROKEN_SECONDS = 2.0
"""A generation that cannot go on is not waited for longer than this, as long as nothing in memory is missing."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A line of the journal with a generation."""

    generation: int
    layout: Layout
    step: int
    time: float
    cause: str
    reason: str
    cost: float

    def as_journaled(self) -> dict[str, Any]:
        """The fields of its line, but the time."""
        told = {"generation": self.generation, "layout": self.layout.as_dict(), "step": self.step}
        return told | {"cause": self.cause, "reason": self.reason, "cost": self.cost}

    @property
    def choice(self) -> LayoutChoice:
        """As the planner had made it; only hosts may know of the decision, and these know nothing of its cost."""
        return LayoutChoice(self.layout, self.layout.world_size, 0, [self.reason], self.cost)


@dataclass(slots=True)
class PastRun:
    """What this very run has decided before its coordinator died."""

    decisions: list[Decision] = field(default_factory=list)
    limits: list[tuple[int, int]] = field(default_factory=list)
    """(how many decisions came before, step): the steps after it were given up at this point"""
    waiting: bool = False
    """for hosts, when the coordinator died"""
    finishing: tuple[str, str] | None = None
    """(state, reason) of the end that was being made"""
    began: bool = False
    superseded: bool = False
    """another run of the job has begun since"""

    @classmethod
    def read(cls, journal: Iterable[Mapping[str, Any]], run_id: str) -> PastRun:
        """What the journal says of ``run_id``; ``began`` is False when that is nothing."""
        past, current, newest = cls(), False, 0
        for line in journal:
            if (claim := line.get("claim", 0)) < newest:
                continue  # of a coordinator that had been stopped and did not know that it is superseded
            newest = claim
            if "run" in line:
                current = line["run"] == run_id
                past.began, past.superseded = past.began or current, past.began and not current
            elif current:
                past._add(line)
        return past

    def _add(self, line: Mapping[str, Any]) -> None:
        if "generation" in line:
            layout, cost = Layout(**line["layout"]), line.get("cost", 0.0)
            told = line["generation"], layout, line["step"], line["time"], line["cause"], line.get("reason", ""), cost
            self.limits.append((len(self.decisions), line["step"]))
            self.decisions.append(Decision(*told))
            self.waiting = False
        elif "waiting_after" in line:
            self.limits.append((len(self.decisions), line["waiting_after"]))
            self.waiting = True
        elif "finishing" in line:
            self.finishing = line["finishing"], line["reason"]

    def replay(self, inventory: Inventory) -> None:
        """Let ``inventory`` know the generations there were and which of their steps were given up."""
        opened = 0
        for count, step in self.limits:
            for decision in self.decisions[opened:count]:
                inventory.open_generation(decision.generation, decision.layout.world_size)
            opened = count
            inventory.give_up_after(step)
        for decision in self.decisions[opened:]:
            inventory.open_generation(decision.generation, decision.layout.world_size)


class Verdict(Enum):
    """What can be done with the generation that the hosts tell of."""

    WAIT = auto()  # for more hosts
    BEGIN = auto()  # nobody knows of any
    ADOPT = auto()  # all of its trainers step on
    REPLACE = auto()  # some do not, or it never came to a step


@dataclass(frozen=True, slots=True)
class _Told:
    """A host and its story."""

    host: HostRecord
    message: Message

    @property
    def rank(self) -> int:
        return int(self.message["part"]["rank"])

    @property
    def steps_on(self) -> bool:
        """Its trainer lives, and has formed all of its groups: the store that it would need for them is gone."""
        return bool(self.message["part"]["running"] and self.message["steps"] and not self.message["last_words"])


class Stories:
    """What the hosts of one run have told since the coordinator is back.

    Args:
        past: what the journal says.
        patience_seconds: a host that is not back by then is lost.
    """

    def __init__(self, past: PastRun, patience_seconds: float) -> None:
        self.past, self._patience = past, patience_seconds
        self._began = math.inf
        self._told: dict[int, _Told] = {}
        self._images: dict[tuple[int, int], set[int]] = {}
        """(generation, step) -> ranks of which somebody has an image"""
        self.later: list[tuple[HostRecord, Message]] = []
        """what was told after the stories, in order"""

    # -- what hosts say ------------------------------------------------------------------------------------------

    def listen(self, now: float) -> None:
        """Hosts can come from ``now`` on, in seconds of a monotonic clock."""
        self._began = now

    def join(self, message: Message) -> None:
        """A host has come back, or has come."""
        for image in message["images"]:
            self._images.setdefault((image["generation"], image["step"]), set()).add(image["rank"])

    def tell(self, host: HostRecord, message: Message) -> None:
        """A host has told its story, or after it something of its trainer."""
        if message["type"] == "story":
            self._told[host.number] = _Told(host, message)
        else:
            self.later.append((host, message))

    def lose(self, host: HostRecord) -> None:
        """It is gone again. What it has told of steps stays true."""
        if (told := self._told.get(host.number)) is not None and told.message["part"] is not None:
            told.message["part"]["running"] = False

    # -- what that amounts to ------------------------------------------------------------------------------------

    @property
    def decision(self) -> Decision | None:
        """The newest generation that the journal, or any host, knows of."""
        parts = [told.message["part"] for told in self._told.values() if told.message["part"] is not None]
        newest = max(parts, key=lambda part: int(part["generation"]), default=None)
        known = self.past.decisions[-1] if self.past.decisions else None
        if newest is None or (known is not None and known.generation >= newest["generation"]):
            return known
        layout = Layout(**newest["layout"])  # the journal's last lines had not come to storage
        return Decision(newest["generation"], layout, newest["start_step"], time.time(), "unknown", "", 0.0)

    @property
    def _ranks(self) -> dict[int, _Told]:
        """Those of the newest generation that have told."""
        newest = self.decision
        parts = [told for told in self._told.values() if told.message["part"] is not None]
        return {told.rank: told for told in parts if newest and told.message["part"]["generation"] == newest.generation}

    @property
    def finished_step(self) -> int:
        """The newest step that is known to be whole on all ranks."""
        return max((told.message["finished_step"] for told in self._ranks.values()), default=0)

    def verdict(self, now: float, logged_step: int) -> Verdict:
        """At ``now``, of the same clock; ``logged_step``: the newest in ``steps.jsonl``."""
        ranks, newest = self._ranks, self.decision
        if newest is not None and len(ranks) == newest.layout.world_size:
            going_on = all(told.steps_on for told in ranks.values()) and not self.last_words()
            gap = self.finished_step > logged_step and self.first_unknown(logged_step) <= self.finished_step
            return Verdict.ADOPT if going_on and not gap and self.past.finishing is None else Verdict.REPLACE
        broken = not any(told.steps_on for told in ranks.values()) or bool(self.last_words())
        waited = now - self._began
        enough = broken and waited >= BROKEN_SECONDS and self._in_memory(logged_step)
        if not enough and waited < self._patience:
            return Verdict.WAIT
        return Verdict.BEGIN if newest is None and self.past.finishing is None else Verdict.REPLACE

    def _in_memory(self, step: int) -> bool:
        """Whether the hosts that are back have all images of ``step`` or of a later one."""
        worlds = {decision.generation: decision.layout.world_size for decision in self.past.decisions}
        return any(held >= step and worlds.get(g) == len(ranks) for (g, held), ranks in self._images.items())

    def last_words(self) -> list[tuple[Message, Trouble]]:
        """What the trainers of the newest generation said of their ends, and what trouble that is."""
        said = [(told.host, word) for told in self._ranks.values() for word in told.message["last_words"]]
        said += [(host, message) for host, message in self.later if message["type"] in LAST_WORDS]
        return [(word, _trouble(host, word)) for host, word in said]

    def first_unknown(self, logged_step: int) -> int:
        """The first step after ``logged_step`` that no host has told of."""
        known = {stepped["message"]["step"] for told in self._ranks.values() for stepped in told.message["steps"]}
        step = logged_step + 1
        while step in known:
            step += 1
        return step

    def rebuilt(self, logged_step: int) -> Generation | None:
        """The newest generation as far as hosts have told of it, with the steps that are not logged yet."""
        ranks, newest = self._ranks, self.decision
        if newest is None or not ranks:
            return None
        members = [ranks[rank].host for rank in sorted(ranks)]
        cause = Trouble(newest.cause, "", seen=newest.time)
        generation = Generation(newest.generation, newest.layout, members, [], newest.step, cause)
        generation.reason, generation.finished_step, generation.formed = newest.reason, logged_step, newest.time
        for rank, told in ranks.items():
            told.host.trainer_pid = told.message["trainer_pid"]
            for stepped in told.message["steps"]:
                if stepped["message"]["step"] > logged_step:
                    generation.says(rank, stepped["message"])
        return generation

    def describe(self, generation: int, inventory: Inventory) -> None:
        """Let ``inventory`` know what the images of the newest generation hold, and which there are of its last steps.

        Only when all trainers of it go on: another's images may be written over meanwhile.
        """
        finished = self.finished_step
        for rank, told in self._ranks.items():
            inventory.describe(generation, rank, told.message["description"])
            for stepped in told.message["steps"]:
                said = stepped["message"]
                if said["step"] >= finished:
                    inventory.add(generation, rank, said["step"], told.host.node, said["image"])
                    for node, image in stepped["held"].items():
                        inventory.add(generation, rank, said["step"], node, image)


def _trouble(host: HostRecord, word: Message) -> Trouble:
    """What a trainer's last word says."""
    if word["type"] == "trainer_ended":
        return how_it_ended(host, word)
    if word["type"] == "copy_failed":
        return Trouble("copy_failed", f"rank {word['rank']}: {word['error']}")
    return what_it_said(host, word)


def cause_of(troubles: Iterable[Trouble]) -> Trouble:
    """Why a new generation is formed: rather not the echo of another's end."""
    own = (trouble for trouble in troubles if not trouble.is_echo)
    return next(own, Trouble("coordinator_lost", "not all hosts came back with a trainer that steps on"))
