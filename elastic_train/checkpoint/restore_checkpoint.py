"""Loads committed checkpoints: the manifest as parts for ``reader.restore``, and the fall-back to the one before."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from elastic_train.checkpoint.checksums import Checksums
from elastic_train.checkpoint.description import Chunk, Description
from elastic_train.checkpoint.errors import CheckpointError, DamagedChunk
from elastic_train.checkpoint.manifest import CheckpointId, Manifest
from elastic_train.checkpoint.reader import Part, Restored, restore
from elastic_train.checkpoint.sources import ObjectSource
from elastic_train.checkpoint.verify import choose_checkpoint
from elastic_train.parallel.shard import LocalShard
from elastic_train.storage.store import Store


@dataclass(frozen=True, slots=True)
class Loaded:
    """``refused`` has a sentence for each newer checkpoint that was passed over."""

    manifest: Manifest
    restored: Restored
    refused: list[str]


def parts_of(store: Store, manifest: Manifest) -> list[Part]:
    """One part per object of the checkpoint; every chunk has its checksums, so ``restore`` verifies what it reads."""
    chunks: dict[str, list[Chunk]] = {path: [] for path in manifest.objects}
    checksums: dict[str, list[Checksums]] = {path: [] for path in manifest.objects}
    for key, record in manifest.tensors.items():
        for chunk in record.chunks:
            chunks[chunk.object].append(
                Chunk(key, record.dtype, record.shape, chunk.offsets, chunk.sizes, chunk.byte_offset, chunk.nbytes)
            )
            checksums[chunk.object].append(chunk.checksums(manifest.block_bytes))
    return [
        Part(Description(tuple(chunks[path]), nbytes), ObjectSource(store, path), checksums[path])
        for path, nbytes in manifest.objects.items()
    ]


def restore_from_checkpoint(
    state: Mapping[str, LocalShard],
    store: Store,
    *,
    step: int | None = None,
    rank: int = 0,
    expected_keys: Collection[str] | None = None,
) -> Loaded | None:
    """Loads the newest checkpoint that is whole, or exactly ``step``; None when there is no checkpoint at all.

    For one process that decides alone. The ranks of a generation must not: there the coordinator chooses (with
    ``choose_checkpoint``) and each rank restores ``parts_of`` that manifest. Raises CheckpointError when there are
    checkpoints and none of them can be loaded; the sentence lists why.
    """
    damaged: list[str] = []
    excluded: set[CheckpointId] = set()
    while True:
        chosen = choose_checkpoint(store, "sizes", step, excluded)
        refused = damaged + chosen.refused
        manifest = chosen.manifest
        if manifest is None:
            if excluded or chosen.refused_ids:
                raise CheckpointError(f"no checkpoint in {store.uri} can be loaded: " + "; ".join(refused))
            return None
        try:
            restored = restore(state, parts_of(store, manifest), rank=rank, expected_keys=expected_keys)
        except DamagedChunk as error:
            if step is not None:
                raise
            damaged.append(f"the checkpoint of step {manifest.step} is damaged: {error}")
            excluded.add(manifest.id)
            continue
        return Loaded(manifest, restored, refused)
