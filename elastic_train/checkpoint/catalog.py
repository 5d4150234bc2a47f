"""What the checkpoints folder of a job holds: one LIST, and the newest claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic_train.checkpoint.claims import Claim, newest_claim, require_newest
from elastic_train.checkpoint.errors import CheckpointError
from elastic_train.checkpoint.manifest import FOLDER, CheckpointId, Manifest, attempt_of, read_manifest
from elastic_train.storage.errors import AlreadyExists
from elastic_train.storage.store import Entry, Store


@dataclass(frozen=True, slots=True)
class Catalog:
    """``entries`` are all objects below ``checkpoints/``; ``claim`` is the one that counts."""

    store: Store
    entries: Sequence[Entry]
    claim: Claim | None

    @property
    def committed(self) -> list[CheckpointId]:
        """The checkpoints that count, in numeric order (999 before 1000), one per step: that of the newest claim."""
        by_step = {checkpoint.step: checkpoint for checkpoint in self._manifests() if self._counts(checkpoint)}
        return [by_step[step] for step in sorted(by_step)]

    @property
    def fenced(self) -> list[CheckpointId]:
        """Manifests that do not count and never will: a later claim, or one of the same step, is there instead."""
        return [checkpoint for checkpoint in self._manifests() if checkpoint not in self.committed + self.unclaimed]

    @property
    def unclaimed(self) -> list[CheckpointId]:
        """Manifests of claims that are not there: committed after the LIST began, or the claim's record is lost."""
        number = self.claim.number if self.claim else None
        return [checkpoint for checkpoint in self._manifests() if number is not None and checkpoint.claim > number]

    @property
    def attempts(self) -> set[tuple[int, int]]:
        """(step, generation) of all objects, committed or not."""
        return {attempt for entry in self.entries if (attempt := attempt_of(entry.path)) is not None}

    def find(self, step: int) -> CheckpointId:
        """The committed checkpoint of ``step``; raises CheckpointError, naming the steps that there are."""
        committed = {checkpoint.step: checkpoint for checkpoint in self.committed}
        if step not in committed:
            steps = ", ".join(map(str, committed)) or "none"
            raise CheckpointError(
                f"step {step} has no committed checkpoint: {FOLDER}step-{step:08d}-c*.json is missing in "
                f"{self.store.uri}; committed steps: {steps}"
            )
        return committed[step]

    def _manifests(self) -> list[CheckpointId]:
        found = (CheckpointId.of(entry.path) for entry in self.entries)
        return sorted(checkpoint for checkpoint in found if checkpoint is not None)

    def _counts(self, checkpoint: CheckpointId) -> bool:
        return self.claim is None or self.claim.counts(checkpoint.step, checkpoint.claim)


def read_catalog(store: Store) -> Catalog:
    """``store`` is a job folder. Raises StorageError."""
    entries = store.list(FOLDER)
    return Catalog(store, entries, newest_claim(store, entries))


def list_checkpoints(store: Store) -> list[int]:
    """Steps that have a checkpoint, in numeric order."""
    return [checkpoint.step for checkpoint in read_catalog(store).committed]


def load_manifest(store: Store, step: int) -> Manifest:
    """The manifest of ``step``. Raises CheckpointError, naming the object, when there is none or it is unreadable."""
    return read_manifest(store, read_catalog(store).find(step))


@dataclass(frozen=True, slots=True)
class Commit:
    """``created`` says whether this call made the checkpoint; ``manifest`` is the one that counts from now on."""

    created: bool
    manifest: Manifest


def commit(store: Store, manifest: Manifest, claim: Claim) -> Commit:
    """Makes the checkpoint exist, as the holder of ``claim``. Of several callers at once exactly one gets ``created``.

    When this claim has committed the step already, what is there stays: committing the same again, also after a lost
    answer, does no harm, and another attempt's objects are left for retention to remove. Raises Fenced when a later
    claim was taken, before or meanwhile: then the manifest, if it is there at all, counts only if that claim says so.
    """
    if manifest.claim != claim.number or claim.from_step is None:
        raise ValueError(f"a manifest of claim {manifest.claim} cannot be committed under claim {claim.number}")
    require_newest(store, claim)
    created = True
    try:
        store.create(manifest.id.path, manifest.to_json())
    except AlreadyExists:
        created, manifest = False, read_manifest(store, manifest.id)
    require_newest(store, claim)
    return Commit(created, manifest)
