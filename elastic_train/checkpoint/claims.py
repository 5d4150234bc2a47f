"""Claims: which coordinator's commits count.

Each coordinator of a job takes the next number by a conditional create, and its record says from which step it goes on.
Whether a manifest counts is then arithmetic: it does when every later claim went on from its step or a later one. So
a coordinator that was thought dead can still write, but nothing that it writes counts, at whatever moment it does it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from elastic_train.checkpoint.errors import CheckpointError, Fenced
from elastic_train.checkpoint.manifest import FOLDER, reread
from elastic_train.storage.errors import AlreadyExists
from elastic_train.storage.store import Entry, Store

FRESH = -1
"""``from_step`` of a coordinator that began without a checkpoint."""

_CLAIM = re.compile(r"checkpoints/claim-(\d+)\.json")
_PREFIX = f"{FOLDER}claim-"


class Claim(BaseModel):
    """``history`` has (number, from_step) of all claims up to this one, so that the newest record tells everything.

    ``created`` is in seconds since the epoch, by the coordinator's clock; ``holder`` is for people.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: Literal[1] = 1
    number: Annotated[int, Field(ge=1)]
    holder: str
    created: float
    history: tuple[tuple[int, int], ...]

    @property
    def path(self) -> str:
        return f"{_PREFIX}{self.number:08d}.json"

    @property
    def from_step(self) -> int:
        return self.history[-1][1]

    def counts(self, step: int, claim: int) -> bool:
        """Whether a checkpoint of ``step`` that the holder of ``claim`` committed is part of the job's history."""
        return claim <= self.number and all(step <= base for number, base in self.history if number > claim)


def newest_claim(store: Store, entries: Iterable[Entry] | None = None) -> Claim | None:
    """The claim that counts; None for a job that was never started. ``entries``: a LIST of ``checkpoints/``."""
    listed = store.list(_PREFIX) if entries is None else entries
    numbers = [int(match[1]) for entry in listed if (match := _CLAIM.fullmatch(entry.path))]
    if not numbers:
        return None
    path = f"{_PREFIX}{max(numbers):08d}.json"
    return reread(lambda: _read(store, path))


def _read(store: Store, path: str) -> Claim:
    try:
        return Claim.model_validate_json(store.read(path))
    except ValidationError as error:
        raise CheckpointError(
            f"{path} in {store.uri} is not the record of a claim: {error.errors()[0]['msg']}"
        ) from None


def take_claim(store: Store, from_step: int, holder: str, created: float) -> Claim:
    """Make the caller the one whose commits count, from now on. ``from_step`` is where it goes on, or ``FRESH``."""
    while True:
        before = newest_claim(store)
        number = before.number + 1 if before else 1
        history = (*(before.history if before else ()), (number, from_step))
        claim = Claim(number=number, holder=holder, created=created, history=history)
        try:
            store.create(claim.path, json.dumps(claim.model_dump(mode="json")).encode())
        except AlreadyExists:
            continue  # somebody else was quicker; the later of the two is the one that counts
        return claim


def require_newest(store: Store, claim: Claim) -> None:
    """Raises Fenced when somebody has taken a later claim."""
    newest = newest_claim(store)
    if newest is not None and newest.number > claim.number:
        raise Fenced(
            f"claim {claim.number} on {store.uri} is superseded by claim {newest.number} of {newest.holder}; "
            "this submission may neither commit nor delete"
        )
