"""Which checkpoints stay, and what of the rest is removed: first a plan, which can be shown, then its execution.

Only the holder of the newest claim removes anything (``claims`` says why that is safe even when it loses the claim in
the middle), and a manifest always goes before its objects: a crash in between leaves objects that nobody believes in,
never a checkpoint with holes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from elastic_train.checkpoint.catalog import Catalog, read_catalog
from elastic_train.checkpoint.claims import Claim, require_newest
from elastic_train.checkpoint.errors import CheckpointError, Fenced
from elastic_train.checkpoint.manifest import (
    FOLDER,
    REFUSED,
    CheckpointId,
    Manifest,
    attempt_of,
    claim_of,
    manifest_at,
    read_manifest,
)
from elastic_train.checkpoint.pins import pin_reason, pinned
from elastic_train.checkpoint.verify import wrong_sizes
from elastic_train.config.operation import CheckpointConfig
from elastic_train.storage.errors import NotFound
from elastic_train.storage.store import Entry, Store, Unfinished

_BATCH = 100
"""Deletes between two looks at the claims."""
_PARALLEL = 8

T = TypeVar("T")


@dataclass(slots=True)
class RetentionPlan:
    """``keep`` has the reasons of each checkpoint that stays.

    ``delete``: checkpoints to remove, with their objects in ``objects``. ``garbage``: what no checkpoint that counts
    needs, in the order of removal. ``unfinished``: writes that were begun and never ended.
    """

    keep: dict[CheckpointId, list[str]] = field(default_factory=dict)
    delete: list[CheckpointId] = field(default_factory=list)
    objects: dict[CheckpointId, list[str]] = field(default_factory=dict)
    garbage: list[Entry] = field(default_factory=list)
    unfinished: list[Unfinished] = field(default_factory=list)
    sizes: dict[CheckpointId, int] = field(default_factory=dict)
    """bytes that go with each of ``delete``"""
    nbytes: int = 0
    """of all objects that go; what unfinished writes hold is not known"""


@dataclass(slots=True)
class Removed:
    """Steps of the checkpoints that are gone, and how many objects, bytes and unfinished writes."""

    steps: list[int] = field(default_factory=list)
    objects: int = 0
    nbytes: int = 0
    unfinished: int = 0


def plan_retention(store: Store, config: CheckpointConfig, claim: Claim | None) -> RetentionPlan:
    """What of the job folder ``store`` stays and what goes. Reads one LIST and the manifests, changes nothing.

    ``claim`` is the caller's; None plans for whoever has the newest. Raises Fenced when a later one was taken, and
    StorageError.
    """
    unfinished, now = store.unfinished(FOLDER), store.now()  # before the LIST: what it misses is too young anyway
    catalog = read_catalog(store)
    if claim is not None and catalog.claim is not None and catalog.claim.number > claim.number:
        raise Fenced(f"claim {claim.number} on {store.uri} is superseded by claim {catalog.claim.number}")
    manifests, unreadable = _read(store, catalog.committed)
    plan = RetentionPlan()
    _decide(plan, config, catalog, manifests)
    for checkpoint in unreadable + catalog.unclaimed:
        plan.keep.setdefault(checkpoint, []).append("unreadable")
    _mark_garbage(plan, catalog, manifests, now - config.grace_seconds)
    limit = now - config.grace_seconds
    in_progress = _in_progress(catalog, manifests)
    plan.unfinished = [write for write in unfinished if write.started <= limit and not in_progress(write.path)]
    sizes = {entry.path: entry.size for entry in catalog.entries}
    plan.sizes = {found: sum(sizes.get(path, 0) for path in paths) for found, paths in plan.objects.items()}
    plan.nbytes = sum(plan.sizes.values()) + sum(entry.size for entry in plan.garbage)
    return plan


def apply_retention(store: Store, plan: RetentionPlan, claim: Claim) -> Removed:
    """Removes what ``plan`` says, as the holder of ``claim``, which is looked at before each batch.

    A checkpoint that was pinned meanwhile stays.

    Raises Fenced when a later claim was taken: what is left stays for its holder.
    """
    removed = Removed(nbytes=plan.nbytes)
    with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="retention") as pool:
        for checkpoint in plan.delete:
            require_newest(store, claim)
            if pin_reason(store, checkpoint) is not None:  # pinned since the plan was made
                removed.nbytes -= plan.sizes[checkpoint]
                continue
            store.delete(checkpoint.path)
            removed.steps.append(checkpoint.step)
            removed.objects += _all(pool.map(store.delete, plan.objects[checkpoint]))
        manifests = [entry.path for entry in plan.garbage if attempt_of(entry.path) is None]
        objects = [entry.path for entry in plan.garbage if attempt_of(entry.path) is not None]
        for paths in [*_batches(manifests), *_batches(objects)]:
            require_newest(store, claim)
            removed.objects += _all(pool.map(store.delete, paths))
        for writes in _batches(plan.unfinished):
            require_newest(store, claim)
            removed.unfinished += _all(pool.map(store.abandon, writes))
    return removed


def set_aside(store: Store, checkpoint: CheckpointId, claim: Claim) -> str:
    """Moves the manifest of a refused checkpoint to ``refused/``, where it stays for the grace time with its objects.

    The holder of ``claim`` has gone on from an earlier step, so the checkpoint counts no longer in any case; this gives
    people time for a look at it. Returns the new path. One that is there no more is no error. Raises Fenced.
    """
    require_newest(store, claim)
    aside = checkpoint.path.replace(FOLDER, REFUSED, 1)
    try:
        store.write(aside, [store.read(checkpoint.path)])
    except NotFound:
        return aside
    store.delete(checkpoint.path)
    return aside


def _read(store: Store, checkpoints: Iterable[CheckpointId]) -> tuple[dict[CheckpointId, Manifest], list[CheckpointId]]:
    """(the readable manifests, those that are not)"""
    manifests, unreadable = {}, []
    for checkpoint in checkpoints:
        try:
            manifests[checkpoint] = read_manifest(store, checkpoint)
        except CheckpointError:
            unreadable.append(checkpoint)
    return manifests, unreadable


def _decide(
    plan: RetentionPlan, config: CheckpointConfig, catalog: Catalog, manifests: dict[CheckpointId, Manifest]
) -> None:
    """Fills ``keep`` and ``delete`` with all readable checkpoints; only the whole ones count for the rules."""
    damaged = {found for found, manifest in manifests.items() if wrong_sizes(manifest, catalog.entries)}
    good = [checkpoint for checkpoint in manifests if checkpoint not in damaged]

    def keep(checkpoints: Iterable[CheckpointId], reason: Callable[[CheckpointId], str]) -> None:
        for checkpoint in checkpoints:
            plan.keep.setdefault(checkpoint, []).append(reason(checkpoint))

    keep(good[-config.keep_last :], lambda _: "newest")
    if config.keep_every is not None:
        every = config.keep_every
        keep((found for found in good if found.step % every == 0), lambda _: f"every {every}")
    values = {found: manifests[found].metrics.get(config.metric, math.nan) for found in good}
    # Of equal values the later one is the better: it has seen more.
    ranked = sorted((found for found in good if not math.isnan(values[found])), key=lambda f: (values[f], -f.step))
    keep(ranked[: config.keep_best], lambda found: f"best {config.metric} {values[found]:.6g}")
    keep(sorted(pinned(catalog.entries) & manifests.keys()), lambda _: "pinned")
    keep(good[-1:], lambda _: "last good")
    keep(sorted(damaged), lambda _: "damaged")  # never without a word: that is for whoever refuses it
    plan.delete = [checkpoint for checkpoint in manifests if checkpoint not in plan.keep]
    held = {path for found in plan.keep if found in manifests for path in manifests[found].objects}
    plan.objects = {found: [path for path in manifests[found].objects if path not in held] for found in plan.delete}


def _mark_garbage(plan: RetentionPlan, catalog: Catalog, manifests: dict[CheckpointId, Manifest], limit: float) -> None:
    """Manifests that do not count and objects that nothing names, when they were written before ``limit``."""
    named = {path for manifest in manifests.values() for path in manifest.objects}
    unreadable = {checkpoint.step for checkpoint in plan.keep if checkpoint not in manifests}
    void = {checkpoint.path for checkpoint in catalog.fenced}
    for entry in catalog.entries:
        if entry.path not in void and not entry.path.startswith(REFUSED):
            continue
        if entry.modified <= limit:
            plan.garbage.append(entry)
        else:
            _protect(catalog.store, entry, named, unreadable)
    in_progress = _in_progress(catalog, manifests)
    plan.garbage += [
        entry
        for entry in catalog.entries
        if (attempt := attempt_of(entry.path)) is not None
        and entry.path not in named
        and attempt[0] not in unreadable
        and entry.modified <= limit
        and not in_progress(entry.path)
    ]


def _protect(store: Store, entry: Entry, named: set[str], unreadable: set[int]) -> None:
    """The objects of a manifest that does not count stay as long as it does; all of its step when it cannot be read."""
    checkpoint = CheckpointId.of(entry.path.replace(REFUSED, FOLDER, 1))
    if checkpoint is None:
        return
    try:
        named.update(manifest_at(store, entry.path).objects)
    except (CheckpointError, NotFound):
        unreadable.add(checkpoint.step)


def _in_progress(catalog: Catalog, manifests: dict[CheckpointId, Manifest]) -> Callable[[str], bool]:
    """Whether the newest claim's holder may still be at work on an object, however old its parts are.

    It saves one step at a time, so an attempt that is neither of a later step nor of a later generation than its newest
    checkpoint is over.
    """
    claim = catalog.claim.number if catalog.claim else 0
    own = [(found.step, manifest.generation) for found, manifest in manifests.items() if found.claim == claim]
    step, generation = max(own, default=(-1, -1))

    def may_be(path: str) -> bool:
        attempt = attempt_of(path)
        return attempt is not None and claim_of(path) == claim and (attempt[0] > step or attempt[1] > generation)

    return may_be


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for begin in range(0, len(items), _BATCH):
        yield items[begin : begin + _BATCH]


def _all(done: Iterable[None]) -> int:
    """How many there were; raises the first error."""
    return sum(1 for _ in done)
