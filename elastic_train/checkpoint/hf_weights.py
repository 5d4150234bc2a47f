"""Tensors of a checkpoint as safetensors files, a block of rows at a time, with numpy alone."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from elastic_train.checkpoint.errors import CheckpointError
from elastic_train.checkpoint.manifest import ChunkRecord, TensorRecord
from elastic_train.checkpoint.verified import read_verified
from elastic_train.model.hf_folder import INDEX, SINGLE
from elastic_train.storage.safetensors_header import DTYPE_BYTES, header_bytes
from elastic_train.storage.store import Store

READ_BYTES = 16 * 2**20
"""Read, converted and written at a time, unless one row is larger."""

_ITEM = {"float32": 4, "bfloat16": 2}
"""Bytes of an element, by the dtype in the manifest."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """``scale x B A``: ``down`` is A and ``up`` is B, each a key of the manifest with its record."""

    down: tuple[str, TensorRecord]
    up: tuple[str, TensorRecord]
    scale: float


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A float32 or bfloat16 tensor of a checkpoint, ``key`` in its manifest, and the dtype it is written in ("BF16").

    ``adapter``: is added to it, in float32.
    """

    key: str
    record: TensorRecord
    dtype: str
    adapter: SavedAdapter | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.record.shape) * DTYPE_BYTES[self.dtype]


def write_weights(
    out: Path,
    store: Store,
    tensors: Mapping[str, SavedTensor],
    block_bytes: int,
    shard_bytes: int,
    progress: Callable[[int], None],
) -> None:
    """Write ``tensors`` (by HF name) into files of up to ``shard_bytes`` in folder ``out``; of several, an index too.

    ``block_bytes`` is the manifest's. Every chunk is checked. Raises DamagedChunk; CheckpointError for a value that
    a dtype cannot hold. ``progress`` gets the bytes just written.
    """
    files = list(_split(tensors, shard_bytes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        path = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else SINGLE
        weight_map.update(dict.fromkeys(names, path))
        write_file(out / path, store, {name: tensors[name] for name in names}, block_bytes, progress)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": weight_map,
        }
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_file(
    path: Path, store: Store, tensors: Mapping[str, SavedTensor], block_bytes: int, progress: Callable[[int], None]
) -> None:
    """Write ``tensors`` into the safetensors file ``path``; all else as ``write_weights``."""
    header = header_bytes({name: (tensor.dtype, tensor.record.shape) for name, tensor in tensors.items()})
    with path.open("wb") as file:
        file.write(header)
        file.flush()
        begin = len(header)
        for name, tensor in tensors.items():
            for written in _write_tensor(file.fileno(), begin, store, name, tensor, block_bytes):
                progress(written)
            begin += tensor.nbytes


def _split(tensors: Mapping[str, SavedTensor], shard_bytes: int) -> Iterator[list[str]]:
    """Names for each file, in order, a new file before one would exceed ``shard_bytes``."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield names


def _write_tensor(
    file: int, begin: int, store: Store, name: str, tensor: SavedTensor, block_bytes: int
) -> Iterator[int]:
    """Write all chunks of ``tensor`` to their places in ``file``, where the tensor begins at byte ``begin``.

    Yields the number of bytes after each write.
    """
    added = None if tensor.adapter is None else _Product.read(store, tensor.adapter, block_bytes)
    item = DTYPE_BYTES[tensor.dtype]
    pitch = item * math.prod(tensor.record.shape[1:])
    for chunk in tensor.record.chunks:
        columns = math.prod(chunk.sizes[1:])
        column = chunk.offsets[1] if len(chunk.offsets) > 1 else 0
        row = chunk.offsets[0]
        for values in _rows(store, tensor.key, tensor.record.dtype, chunk, block_bytes):
            if added is not None:
                values = values + added.box(row, column, values.shape)
            data = _narrowed(values, tensor.dtype, name)
            place = begin + row * pitch + column * item
            if columns * item == pitch:
                _write_at(file, place, data)
            else:
                for index in range(len(data)):
                    _write_at(file, place + index * pitch, data[index])
            row += len(data)
            yield data.nbytes


@dataclass(frozen=True, slots=True)
class _Product:
    """``scale x B A`` of an adapter that has been read."""

    down: npt.NDArray[np.float32]
    up: npt.NDArray[np.float32]
    scale: float

    @classmethod
    def read(cls, store: Store, adapter: SavedAdapter, block_bytes: int) -> _Product:
        down, up = (_whole(store, key, record, block_bytes) for key, record in (adapter.down, adapter.up))
        return cls(down, up, adapter.scale)

    def box(self, row: int, column: int, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """The part of ``shape`` at ``row`` and ``column``."""
        rows, columns = shape
        product = self.up[row : row + rows] @ self.down[:, column : column + columns]
        return product * np.float32(self.scale)


def _whole(store: Store, key: str, record: TensorRecord, block_bytes: int) -> npt.NDArray[np.float32]:
    """A matrix with all its chunks, each checked."""
    whole = np.empty(record.shape, dtype=np.float32)
    for chunk in record.chunks:
        (row, column), (rows, columns) = chunk.offsets, chunk.sizes
        parts = [*_rows(store, key, record.dtype, chunk, block_bytes)]
        if parts:
            whole[row : row + rows, column : column + columns] = np.concatenate(parts)
    return whole


def _rows(
    store: Store, key: str, dtype: str, chunk: ChunkRecord, block_bytes: int
) -> Iterator[npt.NDArray[np.float32]]:
    """The chunk, of ``dtype``, as float32 [rows, columns], some rows at a time, each checked."""
    columns = math.prod(chunk.sizes[1:])
    row = _ITEM[dtype] * columns
    step = max(row, READ_BYTES // row * row)
    for begin in range(0, chunk.nbytes, step):
        held = read_verified(store, key, chunk, block_bytes, begin, min(begin + step, chunk.nbytes))
        if dtype == "float32":
            yield held.view(np.float32).reshape(-1, columns)
        else:
            yield (held.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(-1, columns)


def _write_at(file: int, place: int, data: npt.NDArray[np.generic]) -> None:
    view = np.ascontiguousarray(data).data.cast("B")
    while view:
        written = os.pwrite(file, view, place)
        view, place = view[written:], place + written


def _narrowed(values: npt.NDArray[np.float32], dtype: str, name: str) -> npt.NDArray[np.generic]:
    """``values`` rounded to the nearest of ``dtype``, ties to even; what came from the dtype comes out the same."""
    if dtype == "F32":
        return values
    if dtype == "F16":
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        if (np.isinf(half) & np.isfinite(values)).any():
            raise CheckpointError(
                f"{name} has values beyond those of float16 (65504); export it as bfloat16 or float32"
            )
        return half
    bits = values.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    spoilt = np.isnan(values) & ((bits & 0xFFFF) != 0)  # rounding up a NaN can end in infinity or zero
    return np.where(spoilt, ((bits >> 16) | 0x40).astype(np.uint16), rounded)
