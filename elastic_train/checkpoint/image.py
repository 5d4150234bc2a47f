"""Snapshot images: files of a memory file system that outlive the trainer which writes them.

An image is one header page and then the chunks of a ``Description``, which lies beside it as JSON. The state in the
header changes to WRITING before the first byte of data does and to WHOLE after the last one, so a writer killed at any
instant leaves an image that is seen to be torn. The pages belong to the kernel: what a killed process had stored stays.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import struct
from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from elastic_train.checkpoint.description import Description
from elastic_train.checkpoint.errors import CheckpointError, ImageError, NoRoom

HEADER_BYTES = 4096
_MAGIC = b"ETSNAP\x00\x01"
_VERSION = 1
_FIXED = struct.Struct("<8sIIqqqQ")  # magic, version, reserved, generation, rank, nbytes, xxh3 of the description
_STEP = struct.Struct("<q")
_STATE = struct.Struct("<I")
_STEP_AT = 64  # the fields that change have cache lines of their own
_STATE_AT = 128
_NAME = re.compile(r"g(\d{8,})-r(\d{5,})-b(\d+)\.img")


class State(IntEnum):
    """What the data area of an image holds."""

    EMPTY = 0  # created, never written
    WRITING = 1  # a mix of two steps, or on the way to one
    WHOLE = 2  # exactly the step in the header


def image_name(generation: int, rank: int, buffer: int) -> str:
    """File name of one of a rank's images, e.g. ``g00000003-r00002-b1.img``."""
    return f"g{generation:08d}-r{rank:05d}-b{buffer}.img"


def parse_image_name(name: str) -> tuple[int, int, int]:
    """(generation, rank, buffer) of a name that ``image_name`` made.

    Raises ImageError for all else, such as paths: what passes here is safe to open for a peer.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ImageError(f"image name {name!r} is not of the form {image_name(1, 0, 0)}")
    return int(match[1]), int(match[2]), int(match[3])


def description_path(path: Path) -> Path:
    """Where the description of the image at ``path`` lies."""
    return path.with_name(path.name + ".json")


class Image:
    """A mapped image. ``data`` (uint8, [nbytes]) is writable for its creator and for ``open(..., write=True)``."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path = path
        self._map = mapped
        fields: tuple[bytes, int, int, int, int, int, int] = _FIXED.unpack_from(mapped, 0)
        magic, version, _, self.generation, self.rank, self.nbytes, self._digest = fields
        if magic != _MAGIC or version != _VERSION:
            raise ImageError(f"{path} is not a snapshot image of format {_VERSION}")
        if self.nbytes < 0 or len(mapped) != HEADER_BYTES + self.nbytes:
            raise ImageError(f"{path} has {len(mapped)} bytes; its header says {HEADER_BYTES + self.nbytes}")
        self.data: npt.NDArray[np.uint8] = np.frombuffer(mapped, dtype=np.uint8)[HEADER_BYTES:]

    @classmethod
    def create(cls, path: str | Path, generation: int, rank: int, description: Description) -> Image:
        """Makes an EMPTY image of ``description.nbytes`` bytes, all pages allocated, and its description.

        An image that is already at ``path`` is replaced in one step; whoever has it open keeps the old one.
        Raises NoRoom when the file system has too little room (and leaves nothing behind), ImageError for all else.
        """
        path = Path(path)
        total = HEADER_BYTES + description.nbytes
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        handle = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            # Without this a full file system would show as SIGBUS in the middle of a snapshot.
            os.posix_fallocate(handle, 0, total)
            # Not MAP_POPULATE: mmap holds the interpreter's lock, and a step that is computed beside this needs it.
            mapped = mmap.mmap(handle, total, flags=mmap.MAP_SHARED)
            text = description.to_json().encode()
            digest = xxhash.xxh3_64_intdigest(text)
            _FIXED.pack_into(mapped, 0, _MAGIC, _VERSION, 0, generation, rank, description.nbytes, digest)
            _STEP.pack_into(mapped, _STEP_AT, -1)
            _STATE.pack_into(mapped, _STATE_AT, State.EMPTY)
            _write_aside(description_path(path), text)
            os.replace(partial, path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NoRoom(_no_room(path, total)) from error
            raise ImageError(f"{path} cannot be created: {error.strerror}") from error
        finally:
            os.close(handle)
        return cls(path, mapped)

    @classmethod
    def open(cls, path: str | Path, *, write: bool = False) -> Image:
        """Maps an existing image. Without ``write`` the mapping is private: a stray write never reaches the file.

        Raises ImageError when there is no image at ``path`` or its header is damaged.
        """
        path = Path(path)
        try:
            handle = os.open(path, os.O_RDWR if write else os.O_RDONLY)
        except OSError as error:
            raise ImageError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            size = os.fstat(handle).st_size
            if size < HEADER_BYTES:
                raise ImageError(f"{path} has {size} bytes, less than the {HEADER_BYTES} of an image header")
            flags = (mmap.MAP_SHARED | mmap.MAP_POPULATE) if write else mmap.MAP_PRIVATE
            mapped = mmap.mmap(handle, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(handle)
        return cls(path, mapped)

    @property
    def state(self) -> State:
        """Read anew from the header each time: another process may be the writer."""
        value = _STATE.unpack_from(self._map, _STATE_AT)[0]
        if value > State.WHOLE:
            raise ImageError(f"{self.path} has the unknown state {value} in its header")
        return State(value)

    @property
    def whole(self) -> bool:
        return self.state is State.WHOLE

    @property
    def step(self) -> int:
        """The step that is held (WHOLE) or being written (WRITING); -1 for EMPTY."""
        return int(_STEP.unpack_from(self._map, _STEP_AT)[0])

    def begin(self, step: int) -> None:
        """Marks the image torn. To be called before any byte of ``data`` is changed."""
        _STATE.pack_into(self._map, _STATE_AT, State.WRITING)
        _STEP.pack_into(self._map, _STEP_AT, step)

    def finish(self, step: int) -> None:
        """Marks the image as exactly ``step``. To be called when all of ``data`` has been written."""
        state, begun = self.state, self.step
        if state is not State.WRITING or begun != step:
            raise ImageError(f"{self.path} is {state.name} at step {begun}; it cannot be finished as step {step}")
        _STATE.pack_into(self._map, _STATE_AT, State.WHOLE)

    def require(self, step: int) -> None:
        """Raises ImageError unless the image holds exactly ``step`` at this moment."""
        state, held = self.state, self.step
        if state is not State.WHOLE or held != step:
            raise ImageError(f"{self.path} is {state.name} at step {held}; step {step} is wanted")

    def description_text(self) -> bytes:
        """The JSON beside the image; raises ImageError unless it is what the image was made for."""
        beside = description_path(self.path)
        try:
            text = beside.read_bytes()
        except OSError as error:
            raise ImageError(f"{beside} cannot be read: {error.strerror}") from error
        if xxhash.xxh3_64_intdigest(text) != self._digest:
            raise ImageError(f"{beside} is not the description of {self.path}")
        return text

    def description(self) -> Description:
        """The description beside the image; raises CheckpointError as ``description_text`` does."""
        return Description.from_json(self.description_text())

    def close(self) -> None:
        """Lets go of the mapping; it ends when the last view of ``data`` does, so no view can ever fault."""
        self.data = np.empty(0, dtype=np.uint8)
        del self._map


@dataclass(frozen=True, slots=True)
class Adoptable:
    """A whole image with its description, found by ``adoptable``."""

    path: Path
    generation: int
    rank: int
    step: int
    description: Description


def adoptable(directory: str | Path) -> list[Adoptable]:
    """The whole images in ``directory``, by (generation, rank, step); torn, empty and damaged ones are left out.

    A restarted host calls this to offer what its node still holds.
    """
    found = []
    for path in sorted(Path(directory).glob("*.img")):
        try:
            image = Image.open(path)
            if not image.whole:
                continue
            description = image.description()
        except CheckpointError:
            continue  # not an image, or its creator died before it was complete: nothing in it can be used
        found.append(Adoptable(path, image.generation, image.rank, image.step, description))
    return sorted(found, key=lambda image: (image.generation, image.rank, image.step))


def remove_older(directory: str | Path, generation: int, keep: Collection[str] = ()) -> int:
    """Deletes the images of generations before ``generation`` and unfinished ones, but not those whose names are in
    ``keep``; returns how many images.
    """
    removed = 0
    for path in Path(directory).iterdir():
        match = re.match(r"\.?g(\d{8,})-r\d{5,}-b\d+\.img", path.name)
        if match and int(match[1]) < generation and path.name.removesuffix(".json") not in keep:
            path.unlink(missing_ok=True)
            removed += path.suffix == ".img"
    return removed


def _write_aside(path: Path, text: bytes) -> None:
    """Written under another name and renamed: a reader sees the old text or the new one, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(text)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _no_room(path: Path, total: int) -> str:
    room = os.statvfs(path.parent)
    free = room.f_bavail * room.f_frsize
    return f"{path} needs {total} bytes and {path.parent} has {free} free; give snapshot.directory more room"
