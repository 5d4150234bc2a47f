"""The manifest of a checkpoint, and the one act that makes a checkpoint exist: creating it, last and only once.

Objects lie in ``checkpoints/step-00000050-g3-c2-7/``, a prefix of this step, generation, claim and save alone; the
manifest is ``checkpoints/step-00000050-c2.json``, where 2 is the number of the coordinator's claim (``claims``).
Whatever no manifest names does not count, and a manifest does not count either when a later claim did not build on it.
All paths are relative to the job folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from elastic_train.checkpoint.checksums import Checksums, block_count
from elastic_train.checkpoint.errors import CheckpointError
from elastic_train.checkpoint.sealed import reread, seal, unseal, version_of
from elastic_train.storage.errors import NotFound
from elastic_train.storage.formats import require_known
from elastic_train.storage.store import Store, join

FOLDER = "checkpoints/"
REFUSED = f"{FOLDER}refused/"
"""Where manifests of checkpoints go that a run has found damaged."""
FORMAT_VERSION: Literal[2] = 2
"""Of manifests. Format 1 was never released."""
_MANIFEST = re.compile(r"checkpoints/step-(\d+)-c(\d+)\.json")
_ATTEMPT = re.compile(r"checkpoints/step-(\d+)-g(\d+)(?:-(?:c(\d+)-)?[0-9a-f]+)?/.+")

Count = Annotated[int, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ChunkRecord(_Record):
    """A box of a tensor in an object: ``offsets`` and ``sizes`` in elements, byte range, xxh3 of each of its blocks."""

    offsets: tuple[Count, ...]
    sizes: tuple[Count, ...]
    object: str
    byte_offset: Count
    nbytes: Count
    xxh3: tuple[str, ...]

    def checksums(self, block_bytes: int) -> Checksums:
        """``block_bytes`` is the manifest's."""
        return Checksums(block_bytes, self.nbytes, self.xxh3)


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
    """A committed checkpoint: the state after ``step``.

    ``objects`` maps paths to exact sizes in bytes; ``block_bytes`` is the length of the blocks that have checksums;
    ``created`` is in seconds since the epoch; ``metrics`` has what is known of the step, such as ``loss``.
    """

    format_version: Literal[2] = FORMAT_VERSION
    step: Count
    claim: Count
    generation: Count
    cursor: Count
    created: Annotated[float, Field(ge=0)]
    seed: Count
    layout: dict[str, int]
    config_digest: str
    data_digest: str
    model: dict[str, object]
    metrics: dict[str, float]
    versions: dict[str, str]
    block_bytes: Annotated[int, Field(gt=0)]
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
                if len(chunk.xxh3) != block_count(chunk.nbytes, self.block_bytes):
                    raise ValueError(f"a chunk of {key} has {len(chunk.xxh3)} checksums for {chunk.nbytes} bytes")
        return self

    @property
    def id(self) -> CheckpointId:
        return CheckpointId(self.step, self.claim)

    @property
    def nbytes(self) -> int:
        """Of all objects."""
        return sum(self.objects.values())

    def to_json(self) -> bytes:
        """Compact, with sorted keys (equal manifests are equal bytes), and the xxh3 of it all at the end."""
        return seal(
            "manifest", json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()
        )

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Raises CheckpointError for anything that is not a manifest of this format, to the last bit."""
        body = unseal("manifest", text)
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise CheckpointError(f"not a manifest of format 2: {place} {first['msg']}") from error


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """Which checkpoint: the step, and the claim of the coordinator that committed it."""

    step: int
    claim: int

    @property
    def path(self) -> str:
        """``checkpoints/step-00000050-c2.json``."""
        return f"{FOLDER}step-{self.step:08d}-c{self.claim}.json"

    @classmethod
    def of(cls, path: str) -> CheckpointId | None:
        """Of a manifest's path; None for any other object."""
        match = _MANIFEST.fullmatch(path)
        return cls(int(match[1]), int(match[2])) if match else None


def object_path(step: int, generation: int, rank: int, attempt: str = "") -> str:
    """``checkpoints/step-00000050-g3-c2-7/rank-00002.bin``; ``attempt`` is ``c2-7`` (claim 2, save 7) or nothing."""
    return f"{FOLDER}step-{step:08d}-g{generation}{attempt and '-' + attempt}/rank-{rank:05d}.bin"


def attempt_of(path: str) -> tuple[int, int] | None:
    """(step, generation) of the attempt that an object belongs to; None for any other object."""
    match = _ATTEMPT.fullmatch(path)
    return (int(match[1]), int(match[2])) if match else None


def claim_of(path: str) -> int | None:
    """The claim under which an object was uploaded, where its path says so."""
    match = _ATTEMPT.fullmatch(path)
    return int(match[3]) if match and match[3] else None


def merge(uploads: Iterable[UploadedObject]) -> tuple[dict[str, TensorRecord], dict[str, int]]:
    """(tensors, objects) of a manifest from what all ranks have uploaded. Raises CheckpointError when they disagree."""
    first: dict[str, TensorRecord] = {}
    chunks: dict[str, list[ChunkRecord]] = {}
    objects: dict[str, int] = {}
    for upload in uploads:
        objects[upload.path] = upload.nbytes
        for key, record in upload.tensors.items():
            known = first.setdefault(key, record)
            if (known.dtype, known.shape) != (record.dtype, record.shape):
                raise CheckpointError(
                    f"{upload.path} has {key} as {record.dtype} {record.shape}; others have {known.dtype} {known.shape}"
                )
            chunks.setdefault(key, []).extend(record.chunks)
    tensors = {key: record.model_copy(update={"chunks": tuple(chunks[key])}) for key, record in first.items()}
    return tensors, objects


def manifest_at(store: Store, path: str) -> Manifest:
    """What ``path`` holds, wherever that is.

    Raises NotFound, CheckpointError for what stays no manifest, and FutureFormat for one of a later release: that is
    not damaged, and nobody may set it aside.
    """

    def read() -> Manifest:
        text = store.read(path)
        try:
            return Manifest.from_json(text)
        except CheckpointError:
            require_known(join(store.uri, path), version_of("manifest", text), FORMAT_VERSION)
            raise

    return reread(read)


def read_manifest(store: Store, checkpoint: CheckpointId) -> Manifest:
    """Raises CheckpointError, naming the object, when it is not there or not to be read."""
    path = checkpoint.path
    try:
        manifest = manifest_at(store, path)
    except NotFound as error:
        raise CheckpointError(f"{path} is missing in {store.uri}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path} in {store.uri} is {error}") from error
    if manifest.id != checkpoint:
        raise CheckpointError(f"{path} in {store.uri} says it is of step {manifest.step} and claim {manifest.claim}")
    return manifest
