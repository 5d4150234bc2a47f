"""What a step was trained on, as a number that does not depend on which rank read what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    import numpy.typing as npt

    Arrays = Sequence[npt.NDArray[np.int64]]

_MODULUS = 2**64


def slot_digest(slot: int, samples: Arrays) -> int:
    """xxh3 of a slot's arrays (``data.samples.Slot``), seeded with its number."""
    digest = xxhash.xxh3_64(seed=slot)
    for array in samples:
        digest.update(np.ascontiguousarray(array).data)
    return digest.intdigest()


def batch_digest(slots: Iterable[int], samples: Iterable[Arrays]) -> str:
    """Of some slots of a step, 16 hex digits. Those of all ranks add up to the step's (:func:`add_digests`)."""
    total = sum(slot_digest(slot, held) for slot, held in zip(slots, samples, strict=True))
    return f"{total % _MODULUS:016x}"


def add_digests(digests: Iterable[str]) -> str:
    """The digest of all the slots that ``digests`` are of, in any order: a sum modulo 2^64."""
    return f"{sum(int(digest, 16) for digest in digests) % _MODULUS:016x}"


def covered(ranges: Iterable[Sequence[int]]) -> list[list[int]]:
    """Sorted [first, end) ranges, those joined that follow each other; what overlaps stays apart, to be seen.

    So S slots that were each computed once are ``[[0, S]]``.
    """
    joined: list[list[int]] = []
    for first, end in sorted(tuple(place) for place in ranges if place[0] < place[1]):
        if joined and joined[-1][1] == first:
            joined[-1][1] = end
        else:
            joined.append([first, end])
    return joined
