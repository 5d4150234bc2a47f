"""Scattered bytes of an image in one answer: what a byte server is asked for, checked, and put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from elastic_train.checkpoint.errors import SourceError
from elastic_train.checkpoint.spans import Runs

MOST_RANGES = 4096
"""Ranges of one request."""
MOST_GATHERED = 64 * 2**20
"""Bytes of one answer that have to be put together; a single run is sent from where it lies, whatever its size."""


def ranges(request: dict[str, Any], nbytes: int) -> list[Runs]:
    """The ``ranges`` of a request for parts of an image of ``nbytes`` bytes: [begin, length, stride, count] each.

    Raises SourceError unless they lie in the image, ascend and do not overlap, so that no answer is larger than it.
    """
    rows = request.get("ranges")
    if not isinstance(rows, list) or len(rows) > MOST_RANGES:
        given = f"{len(rows)} of them" if isinstance(rows, list) else repr(rows)
        raise SourceError(f"ranges must be a list of at most {MOST_RANGES} rows, not {given}")
    found: list[Runs] = []
    for row in rows:
        runs = _runs(row)
        if found and runs.begin < found[-1].end:
            raise SourceError(f"range {row} begins before byte {found[-1].end}, the end of the one before it")
        if runs.end > nbytes:
            raise SourceError(f"range {row} ends at byte {runs.end}, behind the {nbytes} bytes of the image")
        found.append(runs)
    total = sum(runs.nbytes for runs in found)
    if total > MOST_GATHERED and not _in_one_piece(found):
        raise SourceError(f"ranges of {total} bytes in all are scattered; at most {MOST_GATHERED} are put together")
    return found


def _runs(row: Any) -> Runs:
    """A row of the request, sound in itself."""
    if not isinstance(row, list) or len(row) != 4 or not all(map(_is_count, row)):
        raise SourceError(f"range {repr(row)[:80]} must be four integers from 0 on: begin, length, stride, count")
    runs = Runs(*row)
    if runs.length < 1 or runs.count < 1 or runs.stride < runs.length:
        raise SourceError(f"range {row} must have length >= 1, stride >= length and count >= 1")
    return runs


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _in_one_piece(found: Sequence[Runs]) -> bool:
    return len(found) == 1 and found[0].count == 1


def gathered(data: npt.NDArray[np.uint8], found: Sequence[Runs]) -> npt.NDArray[np.uint8]:
    """The bytes of ``found`` in ``data``, one after another; a view when they are one run."""
    if _in_one_piece(found):
        return data[found[0].begin : found[0].end]
    answer = np.empty(sum(runs.nbytes for runs in found), dtype=np.uint8)
    done = 0
    for runs in found:
        source = as_strided(data[runs.begin : runs.end], (runs.count, runs.length), (runs.stride, 1), writeable=False)
        answer[done : done + runs.nbytes].reshape(runs.count, runs.length)[:] = source
        done += runs.nbytes
    return answer
