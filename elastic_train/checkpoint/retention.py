"""Removes old checkpoints and the leftovers of dead attempts; only ever called by the coordinator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic_train.checkpoint.errors import CheckpointError
from elastic_train.checkpoint.manifest import FOLDER, Manifest, attempt_of, load_manifest, manifest_path, manifest_step
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
    entries = store.list(f"{FOLDER}step-")
    steps = sorted(step for entry in entries if (step := manifest_step(entry.path)) is not None)
    manifests: dict[int, Manifest] = {}
    for step in steps:
        try:
            manifests[step] = load_manifest(store, step)
        except CheckpointError:
            continue  # unreadable: it neither counts as kept nor says which objects are its own
    good = [step for step, manifest in manifests.items() if not wrong_sizes(manifest, entries)]
    removed = Removed()
    if not good:
        return removed
    oldest_kept = good[-keep:][0]
    deleted: set[str] = set()
    for step in [step for step in manifests if step < oldest_kept]:
        # The manifest goes first: a crash in between leaves objects nobody believes in, not a checkpoint with holes.
        store.delete(manifest_path(step))
        gone = manifests.pop(step).objects
        removed.objects += _delete(store, gone)
        deleted.update(gone)
        removed.steps.append(step)
    named = deleted.union(*(manifest.objects for manifest in manifests.values()))
    newest = manifests[good[-1]]
    unreadable = set(steps) - set(manifests) - set(removed.steps)
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


def set_aside(store: Store, step: int) -> str:
    """Takes the manifest of a refused checkpoint out of the way, so that the step can be committed anew.

    Without this the run that falls back before ``step`` would find the step taken when it gets there again. The
    manifest is kept under another name, which is returned; its objects stay for whoever wants to look at them.
    """
    aside = f"{FOLDER}refused/step-{step:08d}.json"
    store.write(aside, [store.read(manifest_path(step))])
    store.delete(manifest_path(step))
    return aside


def _delete(store: Store, paths: Iterable[str]) -> int:
    count = 0
    for path in paths:
        store.delete(path)
        count += 1
    return count
