"""Which ranks of one generation hold which parts of the state: answers what a rank of another layout has to ask for.

Built while the ranks say what they hold, so that a decision after a failure need not read any of it. No torch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from elastic_train.checkpoint.description import Box, Chunk, Description

SPREAD = 2
"""Of a part that many ranks hold, so many others are named to a rank that has none of them on its own node."""


@dataclass(slots=True)
class _Holders:
    """Groups of ranks (with equal descriptions) that hold one box."""

    groups: list[int] = field(default_factory=list)
    known: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Tensor:
    """The boxes of one tensor; ``boxes`` in the order of their begin in dim 0, once ``begins`` is as long."""

    holders: dict[Box, _Holders] = field(default_factory=dict)
    boxes: list[Box] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    longest: int = 0

    def overlapping(self, chunk: Chunk) -> Iterator[_Holders]:
        if len(self.boxes) != len(self.holders):
            self.boxes = sorted(self.holders)
            self.begins = [_begin(offsets) for offsets, _ in self.boxes]
            self.longest = max(_length(sizes) for _, sizes in self.boxes)
        begin, length = _begin(chunk.offsets), _length(chunk.sizes)
        first = bisect_right(self.begins, begin - self.longest)
        for box in self.boxes[first : bisect_left(self.begins, begin + length)]:
            if _overlap((chunk.offsets, chunk.sizes), box):
                yield self.holders[box]


class Directory:
    """Of one generation."""

    def __init__(self) -> None:
        self._group_of: dict[int, int] = {}
        self._groups: list[list[int]] = []
        self._texts: dict[str, int] = {}
        self._read: list[Description] = []
        """by group"""
        self._tensors: dict[str, _Tensor] = {}

    def __len__(self) -> int:
        """How many ranks have been added."""
        return len(self._group_of)

    def __contains__(self, rank: int) -> bool:
        return rank in self._group_of

    def add(self, rank: int, description: str) -> None:
        """``rank`` holds what the JSON ``description`` says. Replicas say the same."""
        group = self._texts.get(description)
        if group is None:
            self._read.append(Description.from_json(description))
            group = self._texts[description] = len(self._groups)
            self._groups.append([])
            for chunk in self._read[group].chunks:
                tensor = self._tensors.setdefault(chunk.key, _Tensor())
                holders = tensor.holders.setdefault((chunk.offsets, chunk.sizes), _Holders())
                if group not in holders.known:
                    holders.known.add(group)
                    holders.groups.append(group)
        self._groups[group].append(rank)
        self._group_of[rank] = group

    def description(self, rank: int) -> Description:
        """What ``rank``, which has been added, holds."""
        return self._read[self._group_of[rank]]

    def holders(self, needs: Description, rank: int, near: Collection[int], there: Callable[[int], bool]) -> set[int]:
        """The ranks whose images together have all of ``needs`` that anybody has.

        Args:
            needs: what the new ``rank`` has to fill; other ranks begin their choice elsewhere.
            near: ranks whose images are on its node; all of these that have something are named.
            there: whether any image of a rank can be read at all.
        """
        chosen: set[int] = set()
        for chunk in needs.chunks:
            tensor = self._tensors.get(chunk.key)
            for holders in tensor.overlapping(chunk) if tensor is not None else ():
                own = [other for other in near if self._group_of.get(other) in holders.known]
                chosen.update(own)
                chosen.update(self._far(holders, rank, there, 1 if own else SPREAD))
        return chosen

    def _far(self, holders: _Holders, rank: int, there: Callable[[int], bool], count: int) -> Iterator[int]:
        groups = holders.groups
        for number in range(len(groups)):
            members = self._groups[groups[(rank + number) % len(groups)]]
            for place in range(len(members)):
                other = members[(rank + place) % len(members)]
                if there(other):
                    yield other
                    count -= 1
                    break
            if not count:
                return


def _begin(offsets: tuple[int, ...]) -> int:
    return offsets[0] if offsets else 0


def _length(sizes: tuple[int, ...]) -> int:
    return sizes[0] if sizes else 1


def _overlap(one: Box, other: Box) -> bool:
    return all(a < b + n and b < a + m for a, m, b, n in zip(one[0], one[1], other[0], other[1], strict=True))
