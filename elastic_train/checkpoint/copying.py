"""Copies a checkpoint into another job folder, wherever both are: objects first, the manifest last.

The objects go to a prefix that is made from what is in them, so a copy that was cut short goes on where it was, and
two copies of one checkpoint at once do each other no harm.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from elastic_train.checkpoint.catalog import Catalog, commit, read_catalog
from elastic_train.checkpoint.claims import FRESH, take_claim
from elastic_train.checkpoint.errors import CheckpointError, DamagedChunk, Fenced
from elastic_train.checkpoint.manifest import FOLDER, Manifest, TensorRecord, object_path, read_manifest
from elastic_train.checkpoint.pins import pin, unpin
from elastic_train.checkpoint.runs import READ_BYTES, Run, read_run, runs_of
from elastic_train.checkpoint.sources import Bytes, ObjectSource
from elastic_train.checkpoint.verify import verify_checkpoint, wrong_sizes
from elastic_train.storage.store import Store

THREADS = 3
"""Objects copied at once; each has up to 130 MiB in memory: what is read, and the parts of an S3 upload."""


@dataclass(frozen=True, slots=True)
class Copied:
    """``manifest`` is the one in the target. ``created`` is False when it was there; ``reused`` bytes were."""

    manifest: Manifest
    created: bool
    reused: int = 0


def copy_checkpoint(
    source: Store,
    manifest: Manifest,
    target: Store,
    pin_reason: str | None = None,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Copied:
    """Makes the checkpoint ``manifest`` of the job folder ``source`` one of the job folder ``target`` as well.

    Every byte is checked against its checksum while it is copied; what an earlier copy left in ``target`` is checked
    there and not copied again. ``progress`` gets the bytes just done, from several threads. With ``pin_reason`` the
    copy is pinned before it exists. It counts under the newest claim on ``target``, or under one that is taken here.

    Raises CheckpointError when ``target`` has another checkpoint of this step, DamagedChunk when the source is
    damaged, SourceError and StorageError.
    """
    catalog = read_catalog(target)
    if (there := _there(catalog, manifest)) is not None:
        return Copied(there, created=False)
    renamed = _renamed(manifest)
    reused = _reusable(target, renamed, catalog, progress)
    missing = {new: old for old, new in _paths(manifest).items() if new not in reused}
    _copy_objects(source, manifest, target, missing, progress)
    committed = _commit(target, renamed, source.uri, pin_reason)
    return Copied(committed, created=True, reused=sum(renamed.objects[path] for path in reused))


def _there(catalog: Catalog, manifest: Manifest) -> Manifest | None:
    """The same checkpoint in the target; None when the step has none there."""
    found = next((checkpoint for checkpoint in catalog.committed if checkpoint.step == manifest.step), None)
    if found is None:
        return None
    there = read_manifest(catalog.store, found)
    if _content(there) != _content(manifest):
        raise CheckpointError(
            f"{catalog.store.uri} has another checkpoint of step {manifest.step}, from generation {there.generation}; "
            "a step is not replaced, give another folder"
        )
    return there


def _content(manifest: Manifest) -> str:
    """A digest of everything but the claim and the paths of the objects: equal for a checkpoint and its copies."""
    order = {path: index for index, path in enumerate(sorted(manifest.objects))}
    content = manifest.model_dump(mode="json", exclude={"claim", "objects"})
    for record in content["tensors"].values():
        for chunk in record["chunks"]:
            chunk["object"] = order[chunk["object"]]
    content["objects"] = [manifest.objects[path] for path in order]
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())


def _paths(manifest: Manifest) -> dict[str, str]:
    """Object of ``manifest`` -> what its copy is called."""
    attempt = _content(manifest)
    return {
        path: object_path(manifest.step, manifest.generation, index, attempt)
        for index, path in enumerate(sorted(manifest.objects))
    }


def _renamed(manifest: Manifest) -> Manifest:
    paths = _paths(manifest)
    tensors = {
        key: TensorRecord(
            dtype=record.dtype,
            shape=record.shape,
            chunks=tuple(chunk.model_copy(update={"object": paths[chunk.object]}) for chunk in record.chunks),
        )
        for key, record in manifest.tensors.items()
    }
    objects = {paths[path]: nbytes for path, nbytes in manifest.objects.items()}
    return Manifest(**{**dict(manifest), "objects": objects, "tensors": tensors})


def _reusable(target: Store, renamed: Manifest, catalog: Catalog, progress: Callable[[int], None]) -> set[str]:
    """The objects that an earlier copy has left whole."""
    sizes = {entry.path: entry.size for entry in catalog.entries}
    there = {path: nbytes for path, nbytes in renamed.objects.items() if sizes.get(path) == nbytes}
    if not there:
        return set()
    damages = verify_checkpoint(target, renamed, progress, sizes=there)
    return there.keys() - {damage.object for damage in damages}


def _copy_objects(
    source: Store, manifest: Manifest, target: Store, paths: dict[str, str], progress: Callable[[int], None]
) -> None:
    """``paths``: new path -> old path."""
    runs: dict[str, list[Run]] = {}
    for run in runs_of(manifest):
        runs.setdefault(run.object, []).append(run)
    stopped = threading.Event()

    def copy(new: str) -> None:
        old = paths[new]
        size = manifest.objects[old]
        pieces = _pieces(source, manifest.block_bytes, old, size, runs.get(old, []))

        def watched() -> Iterator[memoryview]:
            for piece in pieces:
                if stopped.is_set():
                    raise CheckpointError("the copy was stopped")
                yield piece.data
                progress(len(piece))

        target.write(new, watched(), size_hint=size)

    with ThreadPoolExecutor(THREADS) as pool:
        try:
            for _ in pool.map(copy, paths):
                pass
        finally:
            stopped.set()  # after an error, or Ctrl-C, the other objects must not be copied to their ends


def _pieces(store: Store, block_bytes: int, path: str, size: int, runs: list[Run]) -> Iterator[Bytes]:
    """All bytes of the object ``path``, in order; those of tensors checked. Raises DamagedChunk."""
    source = ObjectSource(store, path)
    done = 0

    def unnamed(end: int) -> Iterator[Bytes]:  # bytes between chunks belong to no tensor and have no checksum
        for begin in range(done, end, READ_BYTES):
            yield source.read(begin, min(READ_BYTES, end - begin))

    for run in runs:
        yield from unnamed(run.begin)
        data, damages = read_run(store, block_bytes, run)
        if damages:
            raise DamagedChunk(damages[0])
        yield data[max(done - run.begin, 0) :]
        done = max(done, run.end)
    yield from unnamed(size)


def _commit(target: Store, renamed: Manifest, source_uri: str, pin_reason: str | None) -> Manifest:
    """Commits under the claim that counts: once more when a coordinator takes a later one meanwhile."""
    while True:
        catalog = read_catalog(target)
        committed = catalog.committed
        claim = catalog.claim or take_claim(
            target, committed[-1].step if committed else FRESH, f"copy from {source_uri}", time.time()
        )
        if claim.from_step is None:
            raise CheckpointError(f"{claim.holder} is just taking over {target.uri}; copy again in a moment")
        manifest = renamed.model_copy(update={"claim": claim.number})
        if pin_reason is not None:
            pin(target, manifest.id, pin_reason)
        try:
            done = commit(target, manifest, claim)
        except Fenced:
            if pin_reason is not None:
                unpin(target, manifest.id)
            continue
        if not done.created and _content(done.manifest) != _content(manifest):
            raise CheckpointError(f"{target.uri}: another checkpoint of step {manifest.step} was committed meanwhile")
        _require_objects(target, done.manifest)
        return done.manifest


def _require_objects(target: Store, manifest: Manifest) -> None:
    """What retention of a running job took for the remains of a dead save, before it had a manifest, is missed here."""
    wrong = wrong_sizes(manifest, target.list(f"{FOLDER}step-{manifest.step:08d}-"))
    if wrong:
        target.delete(manifest.id.path)
        raise CheckpointError(
            f"{target.uri}: objects of the copy were removed meanwhile (checkpoint.grace_seconds of the job there is "
            f"shorter than the copy took): {wrong[0]}; copy again"
        )
