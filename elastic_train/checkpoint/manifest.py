"""The manifest of a checkpoint, and the one act that makes a checkpoint exist: creating it, last and only once.

Objects lie in ``checkpoints/step-00000050-g3/``, a prefix of this step and generation alone; the manifest is
``checkpoints/step-00000050.json``. Whatever no manifest names does not count. All paths are relative to the job folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from elastic_train.checkpoint.errors import CheckpointError
from elastic_train.storage.errors import AlreadyExists, NotFound
from elastic_train.storage.store import Store

FOLDER = "checkpoints/"
_MANIFEST = re.compile(r"checkpoints/step-(\d+)\.json")
_ATTEMPT = re.compile(r"checkpoints/step-(\d+)-g(\d+)(?:-[0-9a-f]+)?/.+")

Count = Annotated[int, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ChunkRecord(_Record):
    """A box of a tensor in an object: ``offsets`` and ``sizes`` in elements, byte range, xxh3 (16 hex digits)."""

    offsets: tuple[Count, ...]
    sizes: tuple[Count, ...]
    object: str
    byte_offset: Count
    nbytes: Count
    xxh3: str


class TensorRecord(_Record):
    """``dtype`` is torch's name ("float32"), ``shape`` the global shape in elements."""

    dtype: str
    shape: tuple[Count, ...]
    chunks: tuple[ChunkRecord, ...]


class UploadedObject(_Record):
    """What one rank has put into storage, for the coordinator: the object, its exact size, the chunks in it by key."""

    path: str
    nbytes: Count
    tensors: dict[str, TensorRecord]


class Manifest(_Record):
    """A committed checkpoint: the state after ``step``. ``objects`` maps paths to exact sizes in bytes."""

    format_version: Literal[1] = 1
    step: Count
    cursor: Count
    generation: Count
    seed: Count
    layout: dict[str, int]
    config_digest: str
    data_digest: str
    model: dict[str, object]
    versions: dict[str, str]
    objects: dict[str, Count]
    tensors: dict[str, TensorRecord]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """A manifest may name objects of its own attempt only, and bytes that they have: it decides what is deleted."""
        for path in self.objects:
            if attempt_of(path) != (self.step, self.generation):
                raise ValueError(f"object {path} does not belong to step {self.step} of generation {self.generation}")
        for key, record in self.tensors.items():
            for chunk in record.chunks:
                if not len(chunk.offsets) == len(chunk.sizes) == len(record.shape):
                    raise ValueError(f"a chunk of {key} has not the {len(record.shape)} dims of its tensor")
                if chunk.byte_offset + chunk.nbytes > self.objects.get(chunk.object, 0):
                    raise ValueError(f"a chunk of {key} lies outside object {chunk.object}")
        return self

    @property
    def path(self) -> str:
        return manifest_path(self.step)

    def to_json(self) -> bytes:
        """Compact, with sorted keys: equal manifests are equal bytes."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Raises CheckpointError for anything that is not a manifest of this format."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise CheckpointError(f"not a manifest of format 1: {place} {first['msg']}") from error


@dataclass(frozen=True, slots=True)
class Commit:
    """``created`` says whether this call made the checkpoint; ``manifest`` is the one that counts from now on."""

    created: bool
    manifest: Manifest


def manifest_path(step: int) -> str:
    """``checkpoints/step-00000050.json``."""
    return f"{FOLDER}step-{step:08d}.json"


def object_path(step: int, generation: int, rank: int, attempt: str = "") -> str:
    """``checkpoints/step-00000050-g3-7f21c09a/rank-00002.bin``; ``attempt`` is hexadecimal digits or nothing."""
    return f"{FOLDER}step-{step:08d}-g{generation}{attempt and '-' + attempt}/rank-{rank:05d}.bin"


def manifest_step(path: str) -> int | None:
    """The step of a manifest's path; None for any other object."""
    match = _MANIFEST.fullmatch(path)
    return int(match[1]) if match else None


def attempt_of(path: str) -> tuple[int, int] | None:
    """(step, generation) of the attempt that an object belongs to; None for any other object."""
    match = _ATTEMPT.fullmatch(path)
    return (int(match[1]), int(match[2])) if match else None


def merge(uploads: Iterable[UploadedObject]) -> tuple[dict[str, TensorRecord], dict[str, int]]:
    """(tensors, objects) of a manifest from what all ranks have uploaded. Raises CheckpointError when they disagree."""
    tensors: dict[str, TensorRecord] = {}
    objects: dict[str, int] = {}
    for upload in uploads:
        objects[upload.path] = upload.nbytes
        for key, record in upload.tensors.items():
            known = tensors.setdefault(key, TensorRecord(dtype=record.dtype, shape=record.shape, chunks=()))
            if (known.dtype, known.shape) != (record.dtype, record.shape):
                raise CheckpointError(
                    f"{upload.path} has {key} as {record.dtype} {record.shape}; others have {known.dtype} {known.shape}"
                )
            tensors[key] = known.model_copy(update={"chunks": known.chunks + record.chunks})
    return tensors, objects


def commit(store: Store, manifest: Manifest) -> Commit:
    """Makes the checkpoint exist. Of several callers at once exactly one gets ``created``.

    When the step is committed already, what is there stays: committing the same again, also after a lost answer, does
    no harm, and another attempt's objects are left for retention to remove.
    """
    try:
        store.create(manifest.path, manifest.to_json())
    except AlreadyExists:
        there = load_manifest(store, manifest.step)
        return Commit(False, there)
    return Commit(True, manifest)


def list_checkpoints(store: Store) -> list[int]:
    """Steps that have a manifest, in numeric order (999 before 1000)."""
    steps = (manifest_step(entry.path) for entry in store.list(f"{FOLDER}step-"))
    return sorted(step for step in steps if step is not None)


def load_manifest(store: Store, step: int) -> Manifest:
    """The manifest of ``step``. Raises CheckpointError, naming the object, when there is none or it is unreadable."""
    path = manifest_path(step)
    try:
        manifest = Manifest.from_json(store.read(path))
    except NotFound as error:
        steps = ", ".join(str(step) for step in list_checkpoints(store)) or "none"
        raise CheckpointError(
            f"step {step} has no committed checkpoint: {path} is missing in {store.uri}; committed steps: {steps}"
        ) from error
    except CheckpointError as error:
        raise CheckpointError(f"{path} in {store.uri} is {error}") from error
    if manifest.step != step:
        raise CheckpointError(f"{path} in {store.uri} says it is of step {manifest.step}")
    return manifest
