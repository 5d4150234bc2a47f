"""Puts snapshots into storage: each distinct chunk once, the work spread over the ranks, one object per rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from elastic_train.checkpoint.checksums import BlockHasher
from elastic_train.checkpoint.description import Chunk, Description
from elastic_train.checkpoint.image import Image
from elastic_train.checkpoint.manifest import ChunkRecord, TensorRecord, UploadedObject
from elastic_train.storage.store import Store

WRITE_BYTES = 8 * 2**20
"""Bytes that are handed to storage at a time."""


def assign_chunks(descriptions: Mapping[int, Description]) -> dict[int, list[int]]:
    """rank -> indices into its chunks that it uploads: every distinct (key, offsets) exactly once.

    A replicated chunk goes, largest first, to the holder with the fewest bytes so far. The same descriptions give the
    same answer everywhere.
    """
    holders: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = {}
    for rank in sorted(descriptions):
        for index, chunk in enumerate(descriptions[rank].chunks):
            if chunk.nbytes:
                holders.setdefault((chunk.key, chunk.offsets), []).append((rank, index))
    load: Counter[int] = Counter()
    assigned: dict[int, list[int]] = {rank: [] for rank in descriptions}

    def give(rank: int, index: int) -> None:
        assigned[rank].append(index)
        load[rank] += descriptions[rank].chunks[index].nbytes

    shared = []
    for places in holders.values():
        if len(places) == 1:
            give(*places[0])
        else:
            shared.append(places)
    shared.sort(key=lambda places: -descriptions[places[0][0]].chunks[places[0][1]].nbytes)
    for places in shared:
        give(*min(places, key=lambda place: (load[place[0]], place[0])))
    return {rank: sorted(indices) for rank, indices in assigned.items()}


def upload_image(
    image: Image, step: int, description: Description, chunk_indices: Sequence[int], store: Store, path: str
) -> UploadedObject:
    """Streams the chosen chunks of ``image`` into the object ``path``, back to back, and gives what the manifest needs.

    Raises ImageError unless the image holds ``step`` from the first byte to the last: then the object is not to be
    used. Raises StorageError when storage fails. With no chunks nothing is written; ``nbytes`` is then 0.
    """
    image.require(step)
    chunks = [description.chunks[index] for index in chunk_indices]
    digests: list[tuple[str, ...]] = []
    if chunks:
        store.write(path, _pieces(image, chunks, digests), size_hint=sum(chunk.nbytes for chunk in chunks))
    image.require(step)
    tensors: dict[str, TensorRecord] = {}
    end = 0
    for chunk, digest in zip(chunks, digests, strict=True):
        record = ChunkRecord(
            offsets=chunk.offsets, sizes=chunk.sizes, object=path, byte_offset=end, nbytes=chunk.nbytes, xxh3=digest
        )
        known = tensors[chunk.key].chunks if chunk.key in tensors else ()
        tensors[chunk.key] = TensorRecord(dtype=chunk.dtype, shape=chunk.global_shape, chunks=(*known, record))
        end += chunk.nbytes
    return UploadedObject(path=path, nbytes=end, tensors=tensors)


def _pieces(image: Image, chunks: Sequence[Chunk], digests: list[tuple[str, ...]]) -> Iterator[memoryview]:
    """The bytes of ``chunks``; adds the checksums of each to ``digests`` as it is read, so that memory is read once."""
    for chunk in chunks:
        hasher = BlockHasher()
        end = chunk.byte_offset + chunk.nbytes
        for begin in range(chunk.byte_offset, end, WRITE_BYTES):
            piece = image.data[begin : min(begin + WRITE_BYTES, end)].data
            hasher.update(piece)
            yield piece
        digests.append(hasher.digests())
