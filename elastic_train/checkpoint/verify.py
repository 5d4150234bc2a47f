"""Is a committed checkpoint still whole? Decided once, by the coordinator, before any rank loads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from elastic_train.checkpoint.catalog import read_catalog
from elastic_train.checkpoint.errors import CheckpointError, Damage, SourceError
from elastic_train.checkpoint.manifest import FOLDER, CheckpointId, Manifest, read_manifest
from elastic_train.checkpoint.runs import Run, read_run, runs_of
from elastic_train.storage.store import Entry, Store

Depth = Literal["sizes", "full"]
"""``sizes``: every object is there with its exact size (one LIST). ``full``: every chunk has its checksum."""
TENSORS_NAMED = 3
"""Of those that a missing object takes along; the others are counted."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """``manifest`` is None when there is nothing to load; ``refused`` has a sentence for each newer one passed over."""

    manifest: Manifest | None
    refused: list[str] = field(default_factory=list)
    refused_ids: list[CheckpointId] = field(default_factory=list)


def choose_checkpoint(
    store: Store, verify: Depth = "sizes", step: int | None = None, exclude: Collection[CheckpointId] = ()
) -> Chosen:
    """The newest checkpoint that is whole and not in ``exclude``, or exactly that of ``step``.

    ``exclude`` is for checkpoints in which a rank has found a DamagedChunk while it loaded. Raises CheckpointError when
    ``step`` is given and has no whole checkpoint (the sentence names the object), StorageError or SourceError when
    storage does not answer: that says nothing about a checkpoint.
    """
    catalog = read_catalog(store)
    if step is not None:
        manifest = read_manifest(store, catalog.find(step))
        damages = check(store, manifest, verify, catalog.entries)
        if damages:
            raise CheckpointError(_refusal(step, damages))
        return Chosen(manifest)
    refused: list[tuple[CheckpointId, str]] = []
    chosen = None
    for candidate in reversed([checkpoint for checkpoint in catalog.committed if checkpoint not in exclude]):
        try:
            manifest = read_manifest(store, candidate)
            damages = check(store, manifest, verify, catalog.entries)
            if not damages:
                chosen = manifest
                break
            refused.append((candidate, _refusal(candidate.step, damages)))
        except SourceError:
            raise
        except CheckpointError as error:
            refused.append((candidate, str(error)))
    newest, known = chosen.step if chosen else -1, {checkpoint.step for checkpoint in catalog.committed}
    sentences = [
        f"step {s} is incomplete (generation {g} uploaded objects but no manifest) and is ignored"
        for s, g in sorted(catalog.attempts, reverse=True)
        if s > newest and s not in known
    ]
    return Chosen(chosen, sentences + [sentence for _, sentence in refused], [checkpoint for checkpoint, _ in refused])


def check(store: Store, manifest: Manifest, verify: Depth, entries: Iterable[Entry] | None = None) -> list[Damage]:
    """What is wrong with the objects of ``manifest``: by size (from ``entries``, a LIST, when given) or in full."""
    damages = wrong_sizes(manifest, store.list(f"{FOLDER}step-") if entries is None else entries)
    return damages if damages or verify == "sizes" else verify_checkpoint(store, manifest)


def wrong_sizes(manifest: Manifest, entries: Iterable[Entry]) -> list[Damage]:
    """Objects that are missing or have another size than the manifest says, each with the tensors this is about."""
    sizes = {entry.path: entry.size for entry in entries}
    return [
        _wrong_size(manifest, path, nbytes, sizes.get(path))
        for path, nbytes in manifest.objects.items()
        if sizes.get(path) != nbytes
    ]


def _wrong_size(manifest: Manifest, path: str, expected: int, actual: int | None) -> Damage:
    begin = min(actual or 0, expected)
    tensors = [
        key
        for key, record in manifest.tensors.items()
        if any(chunk.object == path and chunk.byte_offset + chunk.nbytes > begin for chunk in record.chunks)
    ]
    more = f" and {len(tensors) - TENSORS_NAMED} more" if len(tensors) > TENSORS_NAMED else ""
    found = "no such object" if actual is None else f"{actual} bytes"
    named = ", ".join(tensors[:TENSORS_NAMED]) + more
    return Damage(path, named, begin, max(expected, actual or 0) - begin, f"{expected} bytes", found)


def verify_checkpoint(
    store: Store,
    manifest: Manifest,
    progress: Callable[[int], None] = lambda nbytes: None,
    threads: int = 4,
    sizes: Mapping[str, int] | None = None,
) -> list[Damage]:
    """Reads every chunk and compares its checksum; an empty list means that all are right.

    ``progress`` is called from several threads with the number of bytes just checked. With ``sizes``, those of the
    objects that there are, only what these hold is read: ``wrong_sizes`` names the rest without a request for each
    block. Raises SourceError when storage does not answer.
    """

    def verify_run(run: Run) -> list[Damage]:
        _, damages = read_run(store, manifest.block_bytes, run)
        progress(sum(piece.end - piece.begin for piece in run.pieces))
        return damages

    with ThreadPoolExecutor(threads) as pool:
        return [damage for damages in pool.map(verify_run, runs_of(manifest, sizes)) for damage in damages]


def examine(
    store: Store, manifest: Manifest, entries: Iterable[Entry], progress: Callable[[int], None] = lambda nbytes: None
) -> list[Damage]:
    """All that is wrong with the checkpoint, for people: wrong sizes, and wrong bytes of all that is there.

    ``entries`` is a LIST of the checkpoints (``Catalog.entries``). Raises SourceError when storage does not answer.
    """
    listed = list(entries)
    sizes = {entry.path: entry.size for entry in listed}
    return wrong_sizes(manifest, listed) + verify_checkpoint(store, manifest, progress, sizes=sizes)


def _refusal(step: int, damages: list[Damage]) -> str:
    more = f" (and {len(damages) - 1} more)" if len(damages) > 1 else ""
    return f"the checkpoint of step {step} is damaged: {damages[0]}{more}"
