"""Is a committed checkpoint still whole? Decided once, by the coordinator, before any rank loads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import xxhash

from elastic_train.checkpoint.errors import CheckpointError, Damage, DamagedChunk, SourceError
from elastic_train.checkpoint.manifest import FOLDER, ChunkRecord, Manifest, attempt_of, load_manifest, manifest_step
from elastic_train.checkpoint.sources import ObjectSource
from elastic_train.storage.store import Entry, Store

Depth = Literal["sizes", "full"]
"""``sizes``: every object is there with its exact size (one LIST). ``full``: every chunk has its checksum."""
READ_BYTES = 16 * 2**20
"""Chunks are read together up to this size."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """``manifest`` is None when there is nothing to load; ``refused`` has a sentence for each newer one passed over."""

    manifest: Manifest | None
    refused: list[str] = field(default_factory=list)
    refused_steps: list[int] = field(default_factory=list)


def choose_checkpoint(
    store: Store, verify: Depth = "sizes", step: int | None = None, exclude: Collection[int] = ()
) -> Chosen:
    """The newest checkpoint that is whole and not of a step in ``exclude``, or exactly ``step``.

    ``exclude`` is for checkpoints in which a rank has found a DamagedChunk while it loaded. Raises CheckpointError when
    ``step`` is given and has no whole checkpoint (the sentence names the object), StorageError or SourceError when
    storage does not answer: that says nothing about a checkpoint.
    """
    if step is not None:
        manifest = load_manifest(store, step)
        damages = check(store, manifest, verify)
        if damages:
            raise CheckpointError(_refusal(step, damages))
        return Chosen(manifest)
    entries = store.list(f"{FOLDER}step-")
    steps = {step for step in (manifest_step(entry.path) for entry in entries) if step is not None}
    attempts = {attempt for attempt in (attempt_of(entry.path) for entry in entries) if attempt is not None}
    refused: list[tuple[int, str]] = []
    chosen = None
    for candidate in sorted(steps.difference(exclude), reverse=True):
        try:
            manifest = load_manifest(store, candidate)
            damages = check(store, manifest, verify, entries)
            if not damages:
                chosen = manifest
                break
            refused.append((candidate, _refusal(candidate, damages)))
        except SourceError:
            raise
        except CheckpointError as error:
            refused.append((candidate, str(error)))
    newest = chosen.step if chosen else -1
    sentences = [
        f"step {s} is incomplete (generation {g} uploaded objects but no manifest) and is ignored"
        for s, g in sorted(attempts, reverse=True)
        if s > newest and s not in steps
    ]
    return Chosen(chosen, sentences + [sentence for _, sentence in refused], [s for s, _ in refused])


def check(store: Store, manifest: Manifest, verify: Depth, entries: Iterable[Entry] | None = None) -> list[Damage]:
    """What is wrong with the objects of ``manifest``: by size (from ``entries``, a LIST, when given) or in full."""
    damages = wrong_sizes(manifest, store.list(f"{FOLDER}step-") if entries is None else entries)
    return damages if damages or verify == "sizes" else verify_checkpoint(store, manifest)


def wrong_sizes(manifest: Manifest, entries: Iterable[Entry]) -> list[Damage]:
    """Objects that are missing or have another size than the manifest says."""
    sizes = {entry.path: entry.size for entry in entries}
    damages = []
    for path, nbytes in manifest.objects.items():
        actual = sizes.get(path)
        if actual != nbytes:
            found = "no such object" if actual is None else f"{actual} bytes"
            damages.append(Damage(path, "", 0, nbytes, f"{nbytes} bytes", found))
    return damages


def verify_checkpoint(
    store: Store, manifest: Manifest, progress: Callable[[int], None] = lambda nbytes: None, threads: int = 4
) -> list[Damage]:
    """Reads every chunk and compares its checksum; an empty list means that all are right.

    ``progress`` is called from several threads with the number of bytes just checked. Raises SourceError when storage
    does not answer.
    """
    by_object: dict[str, list[tuple[str, ChunkRecord]]] = {path: [] for path in manifest.objects}
    for key, record in manifest.tensors.items():
        for chunk in record.chunks:
            by_object.setdefault(chunk.object, []).append((key, chunk))
    runs = [(path, run) for path, chunks in by_object.items() for run in _runs(chunks)]

    def verify_run(job: tuple[str, list[tuple[str, ChunkRecord]]]) -> list[Damage]:
        path, run = job
        damages = _verify_run(ObjectSource(store, path), run)
        progress(sum(chunk.nbytes for _, chunk in run))
        return damages

    with ThreadPoolExecutor(threads) as pool:
        return [damage for damages in pool.map(verify_run, runs) for damage in damages]


def _runs(chunks: list[tuple[str, ChunkRecord]]) -> Iterable[list[tuple[str, ChunkRecord]]]:
    """Neighbouring chunks of one object, together up to ``READ_BYTES``."""
    run: list[tuple[str, ChunkRecord]] = []
    for key, chunk in sorted(chunks, key=lambda item: item[1].byte_offset):
        if run and chunk.byte_offset + chunk.nbytes - run[0][1].byte_offset > READ_BYTES:
            yield run
            run = []
        run.append((key, chunk))
    if run:
        yield run


def _verify_run(source: ObjectSource, run: list[tuple[str, ChunkRecord]]) -> list[Damage]:
    begin = run[0][1].byte_offset
    end = max(chunk.byte_offset + chunk.nbytes for _, chunk in run)
    try:
        data = source.read(begin, end - begin)
    except DamagedChunk as error:
        if len(run) > 1:
            return [damage for item in run for damage in _verify_run(source, [item])]
        key, chunk = run[0]
        return [Damage(source.path, key, begin, chunk.nbytes, f"xxh3 {chunk.xxh3}", error.damage.actual)]
    damages = []
    for key, chunk in run:
        first = chunk.byte_offset - begin
        actual = xxhash.xxh3_64_hexdigest(data[first : first + chunk.nbytes].data)
        if actual != chunk.xxh3:
            expected = f"xxh3 {chunk.xxh3}"
            damages.append(Damage(source.path, key, chunk.byte_offset, chunk.nbytes, expected, f"xxh3 {actual}"))
    return damages


def _refusal(step: int, damages: list[Damage]) -> str:
    more = f" (and {len(damages) - 1} more)" if len(damages) > 1 else ""
    return f"the checkpoint of step {step} is damaged: {damages[0]}{more}"
