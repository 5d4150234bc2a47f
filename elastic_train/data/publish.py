"""The end of a preparation: the manifest is written, what it replaces and the work files go."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_train.data.errors import DataError
from elastic_train.data.manifest import MANIFEST, Manifest, read_manifest
from elastic_train.storage.errors import AlreadyExists, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elastic_train.data.manifest import Shard
    from elastic_train.storage.store import Store


@dataclass(frozen=True, slots=True)
class Prepared:
    """A data set in storage. ``reused``: it was there already, made from the same inputs."""

    uri: str
    manifest: Manifest
    digest: str
    reused: bool


def files_of(shard: Shard) -> Iterator[tuple[str, int]]:
    """(path, bytes) of a shard's files."""
    yield shard.path, shard.bytes
    if shard.ends is not None:
        yield shard.ends.path, shard.ends.bytes


class Publication:
    """The manifest of a folder: the one that is there, and the one that takes its place."""

    def __init__(self, store: Store, work: str, overwrite: bool) -> None:
        """``work``: the folder of the work files in ``store``."""
        self._store, self._work, self._overwrite = store, work, overwrite
        self._began = store.now()

    @property
    def is_taken(self) -> bool:
        """Whether a data set is there. It may be the one that is wanted, where nothing can be written."""
        return self._store.exists(MANIFEST)

    def reusable(self, inputs_sha256: str) -> Prepared | None:
        """The data set that is there, if it is made from these inputs and no file is missing.

        (Contents are checked by whoever reads them.) Raises :class:`DataError` for one of other inputs, unless it may
        be overwritten.
        """
        there = self._read()
        if there is None:
            return None
        if there.inputs_sha256 == inputs_sha256 and self._is_whole(there):
            with suppress(StorageError):  # where nothing can be written nothing can be removed
                self.tidy(_folder(there))
            return self._prepared(there, reused=True)
        if there.inputs_sha256 != inputs_sha256 and not self._overwrite:
            raise DataError(self._refusal(there))
        return None

    def publish(self, manifest: Manifest) -> Prepared:
        """Makes ``manifest`` the folder's. Raises :class:`DataError` when another run was faster, with other inputs."""
        there = self._read()
        if there is None and not self._overwrite:
            try:
                self._store.create(MANIFEST, manifest.to_bytes())
            except AlreadyExists:
                there = self._read()
        if there is not None and there.inputs_sha256 != manifest.inputs_sha256 and not self._overwrite:
            self._remove(set(_paths(manifest)) - set(_paths(there)))
            raise DataError(self._refusal(there))
        if there is not None or self._overwrite:
            self._store.write(MANIFEST, [manifest.to_bytes()])
        if there is not None:
            self._remove(set(_paths(there)) - set(_paths(manifest)))
        self.tidy(_folder(manifest))
        return self._prepared(manifest, reused=False)

    def tidy(self, *folders: str) -> None:
        """Removes the work files, and what writes that were killed have left beside them, the manifest, and in
        ``folders``.
        """
        for entry in self._store.list(f"{self._work}/"):
            self._store.delete(entry.path)
        for write in self._store.unfinished():
            ours = write.path.rpartition("/")[0] in ("", self._work, *folders)
            if ours and write.started < self._began:  # later ones may be another run's
                self._store.abandon(write)

    def _read(self) -> Manifest | None:
        if not self._store.exists(MANIFEST):
            return None
        try:
            manifest, _ = read_manifest(self._store)
            list(manifest.shards)  # each is checked when it is asked for
            return manifest
        except DataError:
            if self._overwrite:
                return None
            raise

    def _refusal(self, other: Manifest) -> str:
        older = f" by an earlier version (format {other.format_version})" if other.format_version < 3 else ""
        return (
            f"{self._store.uri} holds a data set made from other inputs{older}; "
            "choose another folder or allow overwriting"
        )

    def _is_whole(self, manifest: Manifest) -> bool:
        sizes = {entry.path: entry.size for entry in self._store.list()}
        files = [file for shard in manifest.shards for file in files_of(shard)]
        return all(path in sizes for path in _paths(manifest)) and all(sizes[path] == size for path, size in files)

    def _prepared(self, manifest: Manifest, reused: bool) -> Prepared:
        return Prepared(self._store.uri, manifest, hashlib.sha256(manifest.to_bytes()).hexdigest(), reused)

    def _remove(self, paths: set[str]) -> None:
        for path in sorted(paths):
            self._store.delete(path)


def _folder(manifest: Manifest) -> str:
    return manifest.tokenizer.path.rpartition("/")[0]


def _paths(manifest: Manifest) -> Iterator[str]:
    """Of all files but the manifest."""
    yield manifest.tokenizer.path
    if manifest.left_out is not None:
        yield manifest.left_out.path
    for shard in manifest.shards:
        yield from (path for path, _ in files_of(shard))
