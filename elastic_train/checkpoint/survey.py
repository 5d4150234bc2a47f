"""All that is in the checkpoints folder of a job, by step: what counts, what does not, and why."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum

from elastic_train.checkpoint.catalog import Catalog
from elastic_train.checkpoint.errors import CheckpointError
from elastic_train.checkpoint.manifest import FOLDER, REFUSED, CheckpointId, Manifest, attempt_of, manifest_at
from elastic_train.checkpoint.pins import pin_reason, pinned
from elastic_train.checkpoint.verify import wrong_sizes
from elastic_train.storage.errors import NotFound
from elastic_train.storage.store import Entry

_THREADS = 8


class Status(StrEnum):
    """Of a line of the survey."""

    COMMITTED = "committed"
    """A checkpoint that counts."""
    PINNED = "pinned"
    """One that counts, and that retention leaves alone."""
    DAMAGED = "damaged"
    """Committed, but an object is missing or has another size; ``verify`` reads the bytes as well."""
    UNREADABLE = "unreadable"
    """Its manifest is damaged."""
    SUPERSEDED = "superseded"
    """A later claim has committed the same step."""
    FENCED = "fenced"
    """A later claim did not go on from it, so it does not count."""
    UNCLAIMED = "unclaimed"
    """The claim that it was committed under is not there, so it does not count."""
    REFUSED = "refused"
    """A run has found it damaged and put its manifest aside."""
    INCOMPLETE = "incomplete"
    """Objects without a manifest: of a save that is under way, or never ended."""


@dataclass(frozen=True, slots=True)
class Found:
    """``note`` is a reason in words, or nothing. ``manifest`` is None where there is none, or none to be read."""

    step: int
    status: Status
    generation: int | None
    claim: int | None
    objects: int
    nbytes: int
    modified: float
    manifest: Manifest | None = None
    note: str = ""


def survey(catalog: Catalog) -> list[Found]:
    """Sorted by step. Raises StorageError; a manifest that cannot be read is a line of its own."""
    places = {entry: place for entry in catalog.entries if (place := _place(entry.path)) is not None}
    with ThreadPoolExecutor(_THREADS) as pool:
        contents = dict(zip(places, pool.map(lambda item: _read(catalog, *item), places.items()), strict=True))
    attempts: dict[str, list[Entry]] = {}
    for entry in catalog.entries:
        if attempt_of(entry.path) is not None:
            attempts.setdefault(entry.path.split("/")[1], []).append(entry)
    lines = []
    for entry, checkpoint in places.items():
        content = contents[entry]
        status, note = _status(catalog, entry.path, checkpoint, content)
        manifest = content if isinstance(content, Manifest) else None
        objects, nbytes = (len(manifest.objects), manifest.nbytes) if manifest else (0, 0)
        generation = manifest.generation if manifest else None
        modified = manifest.created if manifest else entry.modified
        found = checkpoint.step, status, generation, checkpoint.claim, objects, nbytes, modified, manifest, note
        lines.append(Found(*found))
    unreadable = {line.step for line in lines if line.manifest is None}
    named = {path for line in lines if line.manifest for path in line.manifest.objects}
    for entries in attempts.values():
        step, generation = attempt_of(entries[0].path) or (0, 0)
        if step not in unreadable and not any(entry.path in named for entry in entries):
            lines.append(_incomplete(step, generation, entries))
    return sorted(lines, key=lambda line: (line.step, line.claim or 0, line.status == Status.INCOMPLETE))


def _incomplete(step: int, generation: int, entries: list[Entry]) -> Found:
    nbytes, modified = sum(entry.size for entry in entries), max(entry.modified for entry in entries)
    note = "objects without a manifest do not count"
    return Found(step, Status.INCOMPLETE, generation, None, len(entries), nbytes, modified, note=note)


def _place(path: str) -> CheckpointId | None:
    """Which checkpoint the manifest at ``path``, put aside or not, is of."""
    return CheckpointId.of(path.replace(REFUSED, FOLDER, 1))


def _read(catalog: Catalog, entry: Entry, checkpoint: CheckpointId) -> Manifest | str:
    """The manifest, or why there is none."""
    path = entry.path
    try:
        manifest = manifest_at(catalog.store, path)
    except CheckpointError as error:
        return f"{path} is {error}"
    except NotFound:
        return f"{path} was removed just now"
    return (
        manifest if manifest.id == checkpoint else f"{path} says it is of step {manifest.step}, claim {manifest.claim}"
    )


def _status(catalog: Catalog, path: str, checkpoint: CheckpointId, content: Manifest | str) -> tuple[Status, str]:
    claim = catalog.claim
    if path.startswith(REFUSED):
        return Status.REFUSED, "found damaged by a run, and put aside"
    if isinstance(content, str):
        return Status.UNREADABLE, content
    if claim is not None and checkpoint.claim > claim.number:
        return Status.UNCLAIMED, f"there is no claim {checkpoint.claim}: committed just now, or its record is lost"
    if claim is not None and not claim.counts(checkpoint.step, checkpoint.claim):
        return Status.FENCED, f"a claim later than {checkpoint.claim} did not go on from it, so it does not count"
    if checkpoint not in catalog.committed:
        return Status.SUPERSEDED, "a later claim has committed this step anew"
    wrong = wrong_sizes(content, catalog.entries)
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if wrong[1:] else ""
        return Status.DAMAGED, f"{wrong[0]}{more}"
    reason = pin_reason(catalog.store, checkpoint) if checkpoint in pinned(catalog.entries) else None
    return (Status.COMMITTED, "") if reason is None else (Status.PINNED, reason)
