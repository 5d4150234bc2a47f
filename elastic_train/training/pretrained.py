"""Weights of a Hugging Face folder, streamed straight into a rank's shards: no rank ever holds a whole tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from elastic_train.config.errors import ConfigError
from elastic_train.model.hf_folder import HEAD, HfFolder
from elastic_train.parallel.shard import LocalShard
from elastic_train.parallel.stages import EMBEDDING
from elastic_train.storage.safetensors_header import DTYPE_BYTES, StoredTensor

BLOCK_BYTES = 4 * 2**20
"""Read at a time, unless one row is larger."""
THREADS = 4
"""Blocks in memory at a time."""
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class _Block:
    """Some rows of a shard: ``target`` [rows, columns]; they are at ``row`` and ``column`` of the stored tensor."""

    target: Tensor
    row: int
    column: int


def load_pretrained(folder: HfFolder, shards: Mapping[str, LocalShard]) -> None:
    """Fill ``shards`` (by state name, float32), each with its box of the stored tensor. Every value is kept exactly.

    Of a tensor cut by columns the rows are read as a whole. Raises StorageError; ConfigError when a head that is tied
    to the embedding is stored with other values.
    """
    work = [(name, block) for name, shard in shards.items() for block in _blocks(folder.tensors[name], shard)]

    def fill(item: tuple[str, _Block]) -> None:
        name, block = item
        values = _read(folder, folder.tensors[name], block)
        if name == EMBEDDING and folder.tied_head is not None:
            _require_tied(values, _read(folder, folder.tied_head, block), block, folder.store.uri)
        block.target.copy_(values)

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(fill, work):
            pass


def _blocks(stored: StoredTensor, shard: LocalShard) -> Iterator[_Block]:
    if shard.tensor.numel() == 0:
        return
    local = shard.tensor.detach()
    matrix = local if local.dim() == 2 else local[:, None]
    column = shard.offsets[1] if local.dim() == 2 else 0
    step = max(1, BLOCK_BYTES // _row_bytes(stored))
    for start in range(0, matrix.shape[0], step):
        yield _Block(matrix[start : start + step], shard.offsets[0] + start, column)


def _read(folder: HfFolder, stored: StoredTensor, block: _Block) -> Tensor:
    """The values of ``block`` in their stored dtype; one request, from its first element to its last."""
    rows, columns = block.target.shape
    item, pitch = DTYPE_BYTES[stored.dtype], _row_bytes(stored)
    begin = block.row * pitch + block.column * item
    nbytes = (rows - 1) * pitch + columns * item
    # A writable copy, because torch wants it.
    data = bytearray(folder.store.read_agreed(stored.path, stored.begin + begin, nbytes))
    return torch.frombuffer(data, dtype=_DTYPES[stored.dtype]).as_strided((rows, columns), (pitch // item, 1))


def _row_bytes(stored: StoredTensor) -> int:
    return DTYPE_BYTES[stored.dtype] * math.prod(stored.shape[1:])


def _require_tied(embedding: Tensor, head: Tensor, block: _Block, uri: str) -> None:
    if not torch.equal(embedding.float(), head.float()):
        rows = f"{block.row} to {block.row + len(embedding) - 1}"
        raise ConfigError(
            [
                f"{uri}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING} in the rows {rows}; "
                "set tie_word_embeddings to false to train both"
            ]
        )
