"""How a trainer takes the state that the coordinator chose: from memory, the nearest copy first, else from storage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from elastic_train.checkpoint.description import Description
from elastic_train.checkpoint.errors import CheckpointError, ImageError, SourceError
from elastic_train.checkpoint.manifest import CheckpointId, read_manifest
from elastic_train.checkpoint.reader import Part, Restored, restore
from elastic_train.checkpoint.restore_checkpoint import parts_of
from elastic_train.checkpoint.sources import ChunkSource, ImageSource, RemoteSource
from elastic_train.controller.wire import Message
from elastic_train.parallel.shard import LocalShard
from elastic_train.storage.store import Store


class Unreadable(CheckpointError):
    """Copies in memory could not be read, and no other copy was left. ``copies``: those that cannot be read now."""

    def __init__(self, cause: Exception, copies: list[dict[str, Any]]) -> None:
        self.copies = copies
        super().__init__(str(cause))


class DamagedManifest(CheckpointError):
    """The manifest of the checkpoint that was to be restored is gone or cannot be read."""


class Restoration:
    """The restore of one trainer.

    Args:
        plan: ``RestorePlan.summary``.
        pool: where this node's images are.
        token: what other hosts want to see.
        open_store: opens the job folder.
        on_progress: called while it goes on: what is large takes longer than a hang may.
    """

    def __init__(
        self,
        plan: Message,
        pool: Path,
        token: str,
        open_store: Callable[[], Store],
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._plan, self._pool, self._token, self._open_store = plan, pool, token, open_store
        self._on_progress = on_progress
        self._ranks: list[Message] = []

    @property
    def fresh(self) -> bool:
        """There is nothing to restore: the job begins."""
        return not self.from_memory and self._plan["checkpoint"] is None

    @property
    def from_memory(self) -> bool:
        """``run`` needs to be told what memory has."""
        return bool(self._plan["memory"])

    @property
    def images(self) -> set[str]:
        """Names of this node's images that hold the state, and so must stay until the next one is finished."""
        return set(self._plan["images"])

    def run(self, state: Mapping[str, LocalShard], rank: int, keys: Collection[str], ranks: list[Message]) -> Restored:
        """Fill ``state``; the trainer is ``rank`` now, and ``keys`` are those of the whole job.

        ``ranks`` are ``RestorePlan.directions``: the images that have something of it.

        Storage is asked only when memory does not have everything: a restore from memory must not wait for it.

        Raises:
            Unreadable: other images or sources must be chosen.
            StorageError, or SourceError caused by one: storage does not answer.
            DamagedManifest, DamagedChunk: the checkpoint is damaged.
            RestoreError: the state does not fit the job.
        """
        passed_over: list[str] = []
        self._ranks = ranks
        if self._plan["whole"]:
            try:
                return self._restore(state, rank, keys, [], passed_over)
            except (ImageError, SourceError) as error:
                if self._plan["checkpoint"] is None:
                    raise Unreadable(error, self._unreadable()) from error
                passed_over.append(str(error))
        try:
            return self._restore(state, rank, keys, self._saved(), passed_over)
        except ImageError as error:
            raise Unreadable(error, self._unreadable()) from error

    def _saved(self) -> list[Part]:
        store = self._open_store()
        try:
            manifest = read_manifest(store, CheckpointId(self._plan["step"], self._plan["checkpoint"]))
        except CheckpointError as error:
            raise DamagedManifest(str(error)) from error
        return parts_of(store, manifest)

    def _restore(
        self,
        state: Mapping[str, LocalShard],
        rank: int,
        keys: Collection[str],
        saved: list[Part],
        passed_over: list[str],
    ) -> Restored:
        parts = []
        for entry in self._ranks:
            description = Description.from_json(entry["description"])
            parts += [Part(description, self._open(copy)) for copy in entry["copies"]]
        try:
            restored = restore(state, [*parts, *saved], rank=rank, expected_keys=keys, on_progress=self._on_progress)
        finally:
            for part in parts:
                part.source.close()
        restored.passed_over[:0] = passed_over
        return restored

    def _open(self, copy: Mapping[str, Any]) -> ChunkSource:
        step = self._plan["step"]
        if "address" not in copy:
            return ImageSource(self._pool / copy["image"], step)
        address = (copy["address"][0], copy["address"][1])
        return RemoteSource(address, self._token, copy["image"], step)

    def _unreadable(self) -> list[dict[str, Any]]:
        """Which copies it is: each is asked for nothing but its step. A host that is silent may have them still."""
        return [
            {"rank": entry["rank"], "node": copy["node"]}
            for entry in self._ranks
            for copy in entry["copies"]
            if not self._answers(copy)
        ]

    def _answers(self, copy: Mapping[str, Any]) -> bool:
        try:
            source = self._open(copy)
            source.read(0, 0)
            source.close()
        except CheckpointError as error:
            return isinstance(error.__cause__, OSError) and isinstance(error, SourceError)
        return True
