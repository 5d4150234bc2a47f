"""Removes old checkpoints and the leftovers of dead attempts; only ever called by the coordinator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic_train.checkpoint.catalog import read_catalog
from elastic_train.checkpoint.errors import CheckpointError
from elastic_train.checkpoint.manifest import FOLDER, CheckpointId, Manifest, attempt_of, read_manifest
from elastic_train.checkpoint.verify import wrong_sizes
from elastic_train.storage.store import Store


@dataclass(slots=True)
class Removed:
    """Steps of the checkpoints that are gone, and the number of objects deleted."""

    steps: list[int] = field(default_factory=list)
    objects: int = 0


def keep_last(store: Store, keep: int) -> Removed:
    """Keeps the ``keep`` newest checkpoints whose objects are all there, and removes those that are older.

    Damaged checkpoints do not count as kept, so the last good one always stays. Also removes objects of attempts that
    no manifest names when a later generation has committed that step or a later one: their writers are fenced off.
    """
    if keep < 1:
        raise ValueError(f"keep={keep} must be at least 1")
    catalog = read_catalog(store)
    entries, committed = catalog.entries, catalog.committed
    manifests: dict[CheckpointId, Manifest] = {}
    for checkpoint in committed:
        try:
            manifests[checkpoint] = read_manifest(store, checkpoint)
        except CheckpointError:
            continue  # unreadable: it neither counts as kept nor says which objects are its own
    good = [checkpoint for checkpoint, manifest in manifests.items() if not wrong_sizes(manifest, entries)]
    removed = Removed()
    if not good:
        return removed
    oldest_kept = good[-keep:][0]
    deleted: set[str] = set()
    for checkpoint in [checkpoint for checkpoint in manifests if checkpoint < oldest_kept]:
        # The manifest goes first: a crash in between leaves objects nobody believes in, not a checkpoint with holes.
        store.delete(checkpoint.path)
        gone = manifests.pop(checkpoint).objects
        removed.objects += _delete(store, gone)
        deleted.update(gone)
        removed.steps.append(checkpoint.step)
    named = deleted.union(*(manifest.objects for manifest in manifests.values()))
    newest = manifests[good[-1]]
    unreadable = {checkpoint.step for checkpoint in committed if checkpoint not in manifests} - set(removed.steps)
    dead = [
        entry.path
        for entry in entries
        if (attempt := attempt_of(entry.path)) is not None
        and entry.path not in named
        and attempt[0] not in unreadable
        and attempt[0] <= newest.step
        and attempt[1] < newest.generation
    ]
    removed.objects += _delete(store, dead)
    return removed


def set_aside(store: Store, checkpoint: CheckpointId) -> str:
    """Takes the manifest of a refused checkpoint out of the way, so that the step can be committed anew.

    Without this the run that falls back before ``step`` would find the step taken when it gets there again. The
    manifest is kept under another name, which is returned; its objects stay for whoever wants to look at them.
    """
    aside = checkpoint.path.replace(FOLDER, f"{FOLDER}refused/", 1)
    store.write(aside, [store.read(checkpoint.path)])
    store.delete(checkpoint.path)
    return aside


def _delete(store: Store, paths: Iterable[str]) -> int:
    count = 0
    for path in paths:
        store.delete(path)
        count += 1
    return count
