"""Local copies of remote shards, named by content and shared by the processes of a node."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_train.data.errors import DataError
from elastic_train.storage.errors import StorageError

if TYPE_CHECKING:
    from elastic_train.data.manifest import Shard
    from elastic_train.storage.store import Store

BLOCK = 32 * 2**20
COPIES = 4
"""A shard is fetched at most this often: bytes may be spoilt on the way."""


class ShardCache:
    """Files named by the sha256 of their contents. A file under its name is complete and was verified."""

    def __init__(self, folder: str | Path | None = None) -> None:
        if folder is None:
            home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            folder = Path(home) / "elastic_train" / "shards"
        self.folder = Path(folder)

    def fetch(self, store: Store, shard: Shard) -> Path:
        """The local copy, fetched if it is not there; of several processes one fetches, the others wait.

        A copy with the wrong hash is fetched again, in the end refused with :class:`DataError`.
        """
        file = self.folder / f"{shard.sha256}.arrow"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / f"{shard.sha256}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # let go by the system when this process dies
                if file.exists() and file.stat().st_size == shard.bytes:
                    return file
                return self._download(store, shard, file)
        except OSError as error:
            raise StorageError(
                str(file), f"cannot keep a copy of {store.uri}/{shard.path}: {error.strerror}"
            ) from error

    def _download(self, store: Store, shard: Shard, file: Path) -> Path:
        temporary = file.with_name(f".tmp-{secrets.token_hex(8)}")
        try:
            for _ in range(COPIES):
                found = _copy(store, shard, temporary)
                if found == shard.sha256:
                    temporary.rename(file)
                    return file
        finally:
            temporary.unlink(missing_ok=True)
        raise DataError(
            f"shard {store.uri}/{shard.path} is damaged: fetched {COPIES} times, sha256 {found}, "
            f"the manifest says {shard.sha256}"
        )


def _copy(store: Store, shard: Shard, temporary: Path) -> str:
    """Copies the object to ``temporary`` and returns the sha256 of what came."""
    if store.size(shard.path) != shard.bytes:
        raise DataError(
            f"shard {store.uri}/{shard.path} has {store.size(shard.path)} bytes, the manifest says {shard.bytes}"
        )
    digest = hashlib.sha256()
    with temporary.open("wb") as target:
        for offset in range(0, shard.bytes, BLOCK):
            block = store.read(shard.path, offset, min(BLOCK, shard.bytes - offset))
            digest.update(block)
            target.write(block)
        target.flush()
        os.fsync(target.fileno())
    return digest.hexdigest()
