"""Claims: which coordinator's commits count.

Each coordinator of a job takes the next number by a conditional create, and its record says from which step it goes on.
Whether a manifest counts is then arithmetic: it does when every later claim went on from its step or a later one. So
a coordinator that was thought dead can still write, but nothing that it writes counts, at whatever moment it does it.

Who takes over does it in two records: the first announces it and changes nothing of what counts, but from then on
nobody else passes ``require_newest``; only then is the checkpoint chosen, and the second says which. So what an older
coordinator deletes, even when it is paused for hours between its look at the claims and its delete, was old in a
LIST made before the choice: it can never be the chosen one, nor one that is newer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from elastic_train.checkpoint.errors import CheckpointError, Fenced
from elastic_train.checkpoint.manifest import FOLDER, CheckpointId
from elastic_train.checkpoint.sealed import reread, seal, unseal, version_of
from elastic_train.storage.errors import AlreadyExists
from elastic_train.storage.formats import require_known
from elastic_train.storage.store import Entry, Store, join

FRESH = -1
"""``from_step`` of a coordinator that began without a checkpoint."""

FORMAT_VERSION: Literal[1] = 1
_CLAIM = re.compile(r"checkpoints/claim-(\d+)\.json")
_PREFIX = f"{FOLDER}claim-"


class Claim(BaseModel):
    """``history`` has (number, from_step) of all claims up to this one, so that the newest record tells everything.

    A claim that is only announced is not in its history yet. ``created`` is in seconds since the epoch, by the
    coordinator's clock; ``holder`` is for people.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: Literal[1] = FORMAT_VERSION
    number: Annotated[int, Field(ge=1)]
    holder: str
    created: float
    history: tuple[tuple[int, int], ...]

    @property
    def path(self) -> str:
        return _path(self.number)

    @property
    def from_step(self) -> int | None:
        """Where its holder goes on; None while that is not decided: then it may not commit."""
        return self.history[-1][1] if self.history and self.history[-1][0] == self.number else None

    def counts(self, step: int, claim: int) -> bool:
        """Whether a checkpoint of ``step`` that the holder of ``claim`` committed is part of the job's history."""
        return claim <= self.number and all(step <= base for number, base in self.history if number > claim)


def newest_claim(store: Store, entries: Iterable[Entry] | None = None) -> Claim | None:
    """The claim that counts; None for a job that was never started. ``entries``: a LIST of ``checkpoints/``.

    Raises CheckpointError when its record is damaged: an older one would not tell which checkpoints count; FutureFormat
    when a later release has written it.
    """
    numbers = _numbers(store.list(_PREFIX) if entries is None else entries)
    if not numbers:
        return None
    number = max(numbers)
    return reread(lambda: _read(store, number))


def _read(store: Store, number: int) -> Claim:
    path = _path(number)
    try:
        text = store.read(path)
        require_known(join(store.uri, path), version_of("claim", text), FORMAT_VERSION)
        return Claim.model_validate_json(unseal("claim", text))
    except (ValidationError, CheckpointError) as error:
        cause = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise CheckpointError(
            f"{path} in {store.uri}, which tells the checkpoints that count, is damaged: {cause}; put a copy there, "
            f"or delete it, and then the checkpoints named {FOLDER}step-*-c{number}.json do not count"
        ) from None


def announce(store: Store, holder: str, created: float) -> Claim:
    """From now on nobody else may commit or delete. What counts stays as it is until :func:`go_on_from`."""
    while True:
        entries = store.list(FOLDER)
        before = newest_claim(store, entries)
        manifests = [found.claim for entry in entries if (found := CheckpointId.of(entry.path)) is not None]
        number = max([before.number if before else 0, *manifests]) + 1  # also above those whose claims are lost
        claim = Claim(number=number, holder=holder, created=created, history=before.history if before else ())
        try:
            return _create(store, claim)
        except AlreadyExists:
            continue  # somebody else was quicker; the later of the two is the one that counts


def first_claim(store: Store, holder: str, created: float) -> Claim:
    """The claim of a job's first coordinator, in a folder without any; AlreadyExists when somebody was quicker."""
    return _create(store, Claim(number=1, holder=holder, created=created, history=((1, FRESH),)))


def go_on_from(store: Store, claim: Claim, from_step: int, created: float) -> Claim:
    """The claim after ``claim``, of the same holder, which goes on from the checkpoint of ``from_step`` (or ``FRESH``).

    Also for a holder that goes back: what was committed after that step, by anybody, counts no longer. Asked again
    after a lost answer it finds what it has created. Raises Fenced when somebody else has taken that number.
    """
    number = claim.number + 1
    history = (*claim.history, (number, from_step))
    try:
        return _create(store, Claim(number=number, holder=claim.holder, created=created, history=history))
    except AlreadyExists:
        there = reread(lambda: _read(store, number))
        if there.from_step is not None and there.history[:-1] == claim.history:  # nobody else goes on from ``claim``
            return there if there.from_step == from_step else go_on_from(store, there, from_step, created)
        raise _fenced(store, claim, number) from None


def take_claim(store: Store, from_step: int, holder: str, created: float) -> Claim:
    """The next claim, in one record: for a folder in which nobody else can be at work.

    Elsewhere it is :func:`announce`, a look at what there is, and :func:`go_on_from`.
    """
    while True:
        before = newest_claim(store)
        number = before.number + 1 if before else 1
        history = (*(before.history if before else ()), (number, from_step))
        try:
            return _create(store, Claim(number=number, holder=holder, created=created, history=history))
        except AlreadyExists:
            continue


def require_newest(store: Store, claim: Claim) -> None:
    """Raises Fenced when somebody has taken a later claim, CheckpointError when the record of ``claim`` is gone."""
    newest = max(_numbers(store.list(_PREFIX)), default=0)
    if newest > claim.number:
        raise _fenced(store, claim, newest)
    if newest < claim.number:
        raise CheckpointError(f"{claim.path} is gone from {store.uri}: what is committed there would not count")


def _create(store: Store, claim: Claim) -> Claim:
    store.create(claim.path, seal("claim", json.dumps(claim.model_dump(mode="json")).encode()))
    return claim


def _fenced(store: Store, claim: Claim, newest: int) -> Fenced:
    try:
        later = newest_claim(store)
        holder = f" of {later.holder}" if later else ""
    except CheckpointError:
        holder = ""
    return Fenced(
        f"claim {claim.number} on {store.uri} is superseded by claim {newest}{holder}; "
        "this submission may neither commit nor delete"
    )


def _numbers(entries: Iterable[Entry]) -> list[int]:
    return [int(match[1]) for entry in entries if (match := _CLAIM.fullmatch(entry.path))]


def _path(number: int) -> str:
    return f"{_PREFIX}{number:08d}.json"
