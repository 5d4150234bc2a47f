"""Where saved bytes can be read from: an image on this node, a host on another node, an object in storage."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from elastic_train.checkpoint.errors import Damage, DamagedChunk, ImageError, SourceError
from elastic_train.checkpoint.image import Image
from elastic_train.checkpoint.peer import Address, Peer
from elastic_train.checkpoint.spans import Runs
from elastic_train.storage.errors import NotFound, StorageError
from elastic_train.storage.store import Store

Bytes = npt.NDArray[np.uint8]


class ChunkSource(Protocol):
    """Bytes of one image or object. Safe to use from several threads."""

    kind: ClassVar[str]
    """What reports call it."""
    distance: ClassVar[int]
    """Of several sources of one chunk the one with the smallest distance is read."""

    def read(self, byte_offset: int, nbytes: int) -> Bytes:
        """Exactly ``nbytes`` bytes, uint8 [nbytes], from ``byte_offset``. Raises SourceError, ImageError."""
        ...

    def close(self) -> None:
        """Lets go of connections and mappings."""
        ...


class ImageSource:
    """An image on this node, read without a copy. It must hold ``step`` when first read and at the end (``check``)."""

    kind: ClassVar[str] = "image"
    distance: ClassVar[int] = 0

    def __init__(self, path: str | Path, step: int) -> None:
        """The image is opened by the first read: one that is gone matters only to who has no other copy."""
        self._path = path
        self._step = step
        self._lock = threading.Lock()
        self._image: Image | None = None

    def read(self, byte_offset: int, nbytes: int) -> Bytes:
        """A view. Raises ImageError unless the image is whole and of the step, the first time."""
        image, end = self._opened(), byte_offset + nbytes
        if end > image.nbytes:
            raise ImageError(f"{image.path} has {image.nbytes} bytes; bytes up to {end} were asked for")
        return image.data[byte_offset:end]

    def check(self) -> None:
        """Raises ImageError when the image was overwritten since the first read: what was read may be a mix."""
        if self._image is not None:
            self._image.require(self._step)

    def close(self) -> None:
        with self._lock:
            if self._image is not None:
                self._image.close()
                self._image = None

    def _opened(self) -> Image:
        with self._lock:
            if self._image is None:
                image = Image.open(self._path)
                image.require(self._step)
                self._image = image
            return self._image


class RemoteSource:
    """An image on another node, through that host's ``ByteServer``. Every answer's checksum is verified."""

    kind: ClassVar[str] = "remote"
    distance: ClassVar[int] = 1

    def __init__(self, address: Address, token: str, image: str, step: int, timeout: float = 10.0) -> None:
        """``image`` is the file name on the other node; ``timeout`` (seconds) holds for each wait on the network."""
        self._peer = Peer(address, token, timeout)
        self._image = image
        self._step = step

    def read(self, byte_offset: int, nbytes: int) -> Bytes:
        """Raises SourceError with the peer's reason (torn image, other step, wrong token), or the network's."""
        return self.gather([Runs(byte_offset, nbytes, nbytes, 1)] if nbytes else [])

    def gather(self, runs: Sequence[Runs]) -> Bytes:
        """The bytes of ``runs``, which ascend and do not overlap, one after another: only these move.

        Raises SourceError as ``read`` does.
        """
        return self._peer.read(self._image, self._step, runs)

    def close(self) -> None:
        self._peer.close()


class ObjectSource:
    """An object in storage, read by ranged requests. Checksums are those of the manifest, so the reader checks them."""

    kind: ClassVar[str] = "object"
    distance: ClassVar[int] = 2

    def __init__(self, store: Store, path: str, base: int = 0) -> None:
        """``path`` is in ``store``; ``base`` is the byte of the object that counts as offset 0."""
        self._store = store
        self.path = path
        self._base = base

    def read(self, byte_offset: int, nbytes: int) -> Bytes:
        """Raises DamagedChunk when the object is missing or too short, SourceError when storage does not answer."""
        begin = self._base + byte_offset
        try:
            # Torch wants writable memory.
            return np.frombuffer(self._store.read_buffer(self.path, begin, nbytes), dtype=np.uint8)
        except StorageError as error:
            found = self._why(begin + nbytes)
            if found is None:
                raise SourceError(f"object {self.path} cannot be read: {error}") from error
            raise DamagedChunk(Damage(self.path, "", begin, nbytes, f"{nbytes} bytes", found)) from error

    def _why(self, end: int) -> str | None:
        """What is wrong with the object itself, None when nothing is."""
        try:
            size = self._store.size(self.path)
        except NotFound:
            return "no such object"
        except StorageError:
            return None
        return f"an object of {size} bytes" if size < end else None

    def close(self) -> None:
        """Nothing is held between reads."""
