"""What can go wrong with saved state. A message is one sentence: the object, its value, what was expected."""

from __future__ import annotations

from dataclasses import dataclass, replace


class CheckpointError(RuntimeError):
    """Base of all errors of this layer."""


class ImageError(CheckpointError):
    """A snapshot image cannot be made, or is not what its reader asked for (torn, another step, damaged header)."""


class NoRoom(ImageError):
    """The memory file system is too full for an image; the sentence has its path and both numbers of bytes."""


class SourceError(CheckpointError):
    """A source of bytes did not give them: connection lost, refused, timed out, object missing."""


class RestoreError(CheckpointError):
    """State and saved parts do not fit together; ``problems`` has one sentence per key."""

    def __init__(self, problems: list[str], heading: str = "the saved state does not fit this job") -> None:
        self.problems = problems
        super().__init__(f"{heading}: " + "; ".join(problems))


@dataclass(frozen=True, slots=True)
class Damage:
    """One piece of an object in storage that is not what the manifest says.

    ``tensor`` is empty when the object as a whole is wrong (missing, wrong size). ``byte_offset`` and ``nbytes`` are in
    bytes of the object; ``expected`` and ``actual`` are xxh3 digests, sizes, or words such as "missing".
    """

    object: str
    tensor: str
    byte_offset: int
    nbytes: int
    expected: str
    actual: str

    def of(self, tensor: str) -> Damage:
        """The same, with the tensor that it is of."""
        return replace(self, tensor=tensor)

    def __str__(self) -> str:
        place = f"object {self.object}, bytes {self.byte_offset} to {self.byte_offset + self.nbytes}"
        tensor = f" (tensor {self.tensor})" if self.tensor else ""
        return f"{place}{tensor}: expected {self.expected}, found {self.actual}"


class DamagedChunk(CheckpointError):
    """Bytes in storage are missing, short, or do not have the checksum of the manifest."""

    def __init__(self, damage: Damage) -> None:
        self.damage = damage
        super().__init__(str(damage))


class Fenced(CheckpointError):
    """Somebody else has taken over this job: what the caller wanted to write or delete is no longer its to decide."""
