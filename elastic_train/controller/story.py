"""What a host remembers of its rank, for a coordinator that has come back and knows only what is in storage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from elastic_train.controller.wire import Message

LAST_WORDS = ("error", "trainer_ended", "copy_failed")
"""What a generation does not go on after."""


@dataclass(slots=True)
class Stepped:
    """A step of this rank: what its trainer said of it, and where its image is whole."""

    message: Message
    """as it was told to the coordinator; ``copies`` are the nodes that shall have one"""
    held: dict[str, str] = field(default_factory=dict)
    """partner node -> image"""

    @property
    def whole(self) -> bool:
        return set(self.message["copies"]) <= set(self.held)


class Story:
    """Of one host and the generation that it takes part in, if it does.

    The steps are kept from the newest one that is finished and whose line is in storage: the others' lines would be
    lost with the coordinator, and of that one it needs to know where the images are.
    """

    def __init__(self) -> None:
        self._part: dict[str, Any] | None = None
        self._forget()

    def _forget(self) -> None:
        self._trainer_pid: int | None = None
        self._description: str | None = None
        self._last_words: list[Message] = []
        self._steps: dict[int, Stepped] = {}
        self.finished_step = 0

    def begin(self, assignment: Message) -> None:
        """The host takes part in a generation."""
        self._forget()
        self._part = {key: assignment[key] for key in ("generation", "rank", "layout", "start_step")}
        self._part["running"] = True
        self.finished_step = assignment["start_step"]

    def over(self) -> None:
        """Its trainer computes no more. What it has done is still to be told."""
        if self._part is not None:
            self._part["running"] = False

    def told(self, message: Message) -> None:
        """The host has passed this on from its trainer, ``generation`` and ``rank`` with it."""
        if message["type"] == "forked":
            self._trainer_pid = message["pid"]
        elif message["type"] == "described":
            self._description = message["description"]
        elif message["type"] == "stepped":
            self._steps[message["step"]] = Stepped(message)
            self.finished_step = max(self.finished_step, message["step"] - 1)  # else the image had not been written
        elif message["type"] in LAST_WORDS:
            self._last_words.append(message)
            self.over()

    def held(self, generation: int, step: int, node: str, image: str) -> None:
        """A partner has the rank's image of ``step``."""
        if (stepped := self._of(generation, step)) is not None:
            stepped.held[node] = image

    def refused(self, generation: int, step: int, node: str) -> None:
        """A partner takes no copy of ``step``, or cannot: it is done without."""
        if (stepped := self._of(generation, step)) is not None and node in stepped.message["copies"]:
            stepped.message["copies"].remove(node)

    def copy_failed(self, message: Message) -> None:
        """A partner that should have a copy has none."""
        if self._is_of(message["generation"]):
            self.told(message)

    def _is_of(self, generation: int) -> bool:
        return self._part is not None and self._part["generation"] == generation

    def _of(self, generation: int, step: int) -> Stepped | None:
        return self._steps.get(step) if self._is_of(generation) else None

    def finished(self, step: int, stored: int) -> None:
        """``step`` is whole everywhere, and the lines up to ``stored`` are in storage."""
        self.finished_step = max(self.finished_step, step)
        for old in [old for old in self._steps if old < min(step, stored)]:
            del self._steps[old]

    @property
    def held_step(self) -> int:
        """The newest step of which this rank's image is whole wherever it should be."""
        whole = (step for step, stepped in self._steps.items() if stepped.whole)
        return max(whole, default=self.finished_step)

    def as_message(self) -> Message:
        """What a coordinator is told that has come back."""
        message: Message = {"type": "story", "part": self._part}
        if self._part is not None:
            steps = [{"message": stepped.message, "held": stepped.held} for stepped in self._steps.values()]
            message |= {"description": self._description, "last_words": self._last_words, "steps": steps}
            message |= {"finished_step": self.finished_step, "trainer_pid": self._trainer_pid}
        return message
