"""Which buffer the next snapshot of a host's trainer may be written to."""

from __future__ import annotations

from collections.abc import Callable

from elastic_train.checkpoint.image import image_name


class SnapshotBuffers:
    """Of the trainer that runs.

    Args:
        is_read: whether the image of this name must not be written over.
    """

    def __init__(self, is_read: Callable[[str], bool]) -> None:
        self._is_read = is_read
        self.begin(0, 0)

    def begin(self, generation: int, rank: int) -> None:
        """Another trainer, which has written nothing."""
        self._generation, self._rank = generation, rank
        self._written: dict[int, int] = {}
        """step -> buffer"""

    def written(self, step: int, buffer: int) -> None:
        """The trainer has, so the step before is finished."""
        self._written = {old: kept for old, kept in self._written.items() if old >= step - 1}
        self._written[step] = buffer

    def has_gone_on_from(self, step: int) -> bool:
        """The trainer has written a later snapshot, so it knows that ``step`` is finished."""
        return any(written > step for written in self._written)

    def free(self, finished: int) -> int:
        """The lowest that neither holds step ``finished`` nor is being read."""
        buffer = 0
        while buffer == self._written.get(finished) or self._is_read(self._image(buffer)):
            buffer += 1
        return buffer

    def _image(self, buffer: int) -> str:
        return image_name(self._generation, self._rank, buffer)
