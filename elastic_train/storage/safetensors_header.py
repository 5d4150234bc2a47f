"""The header of a safetensors file: 8 bytes of length, JSON, then the tensors' bytes, row-major and little-endian.

Format: https://huggingface.co/docs/safetensors. Read by ranges, so that a header costs two requests in object storage.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_train.storage.errors import StorageError
from elastic_train.storage.store import Store, join

DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
"""Dtypes of weights that are understood here, and the size of an element."""
_MOST_BYTES = 100_000_000
"""Largest header that the format allows."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: ``begin`` is a byte of the file ``path``; ``dtype`` in the words of the format ("BF16")."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


def read_header(store: Store, path: str) -> dict[str, StoredTensor]:
    """Name -> place of every tensor in the file. Raises StorageError for a file that is damaged or cut short."""
    uri, size = join(store.uri, path), store.size(path)
    if size < 8:
        raise StorageError(uri, f"is no safetensors file: it has {size} bytes")
    (length,) = struct.unpack("<Q", store.read_agreed(path, 0, 8))
    if length > min(size - 8, _MOST_BYTES):
        raise StorageError(uri, f"is no safetensors file: its header should have {length} bytes, the file has {size}")
    try:
        header = json.loads(store.read_agreed(path, 8, length))
        tensors = {name: _tensor(path, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StorageError(uri, f"is no safetensors file: its header cannot be read: {error}") from None
    for name, tensor in tensors.items():
        if tensor.begin + tensor.nbytes > size:
            raise StorageError(uri, f"ends at byte {size}, before the end of {name} at {tensor.begin + tensor.nbytes}")
    return tensors


def _tensor(path: str, entry: Any, data: int) -> StoredTensor:
    begin, end = (int(offset) for offset in entry["data_offsets"])
    tensor = StoredTensor(path, str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), data + begin, end - begin)
    item = DTYPE_BYTES.get(tensor.dtype)
    if begin < 0 or end < begin or (item and tensor.nbytes != item * math.prod(tensor.shape)):
        raise ValueError(f"{tensor.dtype} {list(tensor.shape)} does not fill the bytes {begin} to {end}")
    return tensor


def header_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """The beginning of a file whose tensors (name -> dtype, shape) follow one another in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + DTYPE_BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    return struct.pack("<Q", len(text)) + text
