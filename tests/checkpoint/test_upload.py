from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
import xxhash

from elastic_train.checkpoint.capture import describe
from elastic_train.checkpoint.checksums import BLOCK_BYTES
from elastic_train.checkpoint.errors import ImageError
from elastic_train.checkpoint.image import Image
from elastic_train.checkpoint.upload import WRITE_BYTES, assign_chunks, upload_image
from elastic_train.storage.store import Store
from tests.checkpoint.states import even_layout, random_layout, save, some_tensors, write_images


@pytest.mark.parametrize("seed", range(20))
def test_every_distinct_chunk_is_assigned_exactly_once(seed: int) -> None:
    states = random_layout(some_tensors(seed), random.Random(seed))
    descriptions = {rank: describe(state) for rank, state in enumerate(states)}
    distinct = {chunk.identity for description in descriptions.values() for chunk in description.chunks}
    assigned = Counter(
        descriptions[rank].chunks[index].identity
        for rank, indices in assign_chunks(descriptions).items()
        for index in indices
    )
    assert assigned == Counter(distinct)


def test_replicated_chunks_are_spread_evenly_by_bytes() -> None:
    full = {f"w{n:02d}": torch.empty(4 * n) for n in range(1, 33)}
    states = even_layout(full, 1) * 4
    descriptions = {rank: describe(state) for rank, state in enumerate(states)}
    loads = [
        sum(descriptions[rank].chunks[index].nbytes for index in indices)
        for rank, indices in assign_chunks(descriptions).items()
    ]
    assert sum(loads) == sum(tensor.nbytes for tensor in full.values())
    assert max(loads) - min(loads) <= 16


def test_ranks_that_hold_replicas_even_out_what_the_others_hold_alone() -> None:
    alone, shared = {"big": torch.empty(1000)}, {f"w{n}": torch.empty(100) for n in range(10)}
    descriptions = {
        0: describe(even_layout(alone | shared, 1)[0]),
        1: describe(even_layout(shared, 1)[0]),
    }
    assigned = assign_chunks(descriptions)
    assert [descriptions[0].chunks[index].key for index in assigned[0]] == ["big"]
    assert len(assigned[1]) == 10


@pytest.mark.parametrize(("replicas", "shards"), [(2, 1), (5, 1), (8, 1), (2, 2), (2, 4), (4, 2)])
def test_the_ranks_share_the_work_of_a_language_model_evenly(replicas: int, shards: int) -> None:
    """DDP and HSDP of 12 layers of 512 with 32,000 words: its two large tables are half of it."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (32000, 512), "head": (32000, 512), "norm": (512,)}
    matrices = {"q": (512, 512), "kv": (256, 512), "o": (512, 512), "up": (2816, 512), "down": (512, 1408)}
    for layer in range(12):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in matrices.items()}
    full = {
        f"{kind}.{name}": torch.empty(shape, device="meta")
        for kind in ("param", "exp_avg", "exp_avg_sq")
        for name, shape in shapes.items()
    }
    states = even_layout(full, shards) * replicas
    descriptions = {rank: describe(state) for rank, state in enumerate(states)}
    loads = [
        sum(descriptions[rank].chunks[index].nbytes for index in indices)
        for rank, indices in assign_chunks(descriptions).items()
    ]
    assert sum(loads) == sum(tensor.nbytes for tensor in full.values())
    assert max(loads) <= 1.5 * sum(loads) / len(loads)


@pytest.mark.parametrize(("replicas", "shards"), [(5, 1), (2, 3)])
def test_replicas_are_in_storage_once(tmp_path: Path, replicas: int, shards: int) -> None:
    full = some_tensors(3)
    store = Store.open(str(tmp_path / "job"))
    manifest = save(store, tmp_path, even_layout(full, shards) * replicas, step=4)
    assert sum(entry.size for entry in store.list()) == sum(tensor.nbytes for tensor in full.values())
    assert {entry.path: entry.size for entry in store.list()} == manifest.objects


def test_the_object_is_the_chunks_back_to_back_with_their_checksums(tmp_path: Path) -> None:
    full = {"a": torch.randn(5), "skipped": torch.randn(7), "b": torch.randn(WRITE_BYTES // 4 + 3)}
    (path,) = write_images(tmp_path, even_layout(full, 1), step=1)
    image = Image.open(path)
    store = Store.open(str(tmp_path / "job"))
    upload = upload_image(image, 1, image.description(), [0, 2], store, "x.bin")
    a, b = full["a"].numpy().tobytes(), full["b"].numpy().tobytes()
    assert store.read("x.bin") == a + b
    assert upload.nbytes == len(a + b)
    places = {key: (r.chunks[0].byte_offset, r.chunks[0].nbytes, r.chunks[0].xxh3) for key, r in upload.tensors.items()}
    assert places == {
        "a": (0, 20, digests(a)),
        "b": (20, len(b), digests(b)),
    }


def digests(data: bytes) -> tuple[str, ...]:
    return tuple(xxhash.xxh3_64_hexdigest(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES))


def test_a_rank_without_chunks_writes_nothing(tmp_path: Path) -> None:
    (path,) = write_images(tmp_path, even_layout(some_tensors(1), 1), step=1)
    image = Image.open(path)
    store = Store.open(str(tmp_path / "job"))
    upload = upload_image(image, 1, image.description(), [], store, "x.bin")
    assert (upload.nbytes, upload.tensors) == (0, {})
    assert not store.exists("x.bin")


def test_an_image_of_another_step_or_torn_is_not_uploaded(tmp_path: Path) -> None:
    (path,) = write_images(tmp_path, even_layout(some_tensors(1), 1), step=1)
    image = Image.open(path, write=True)
    store = Store.open(str(tmp_path / "job"))
    with pytest.raises(ImageError, match="WHOLE at step 1; step 2 is wanted"):
        upload_image(image, 2, image.description(), [0], store, "x.bin")

    class Overtaken(type(store)):  # type: ignore[misc]
        """The trainer begins the next snapshot in this image while it is being uploaded."""

        def write(self, path, chunks, size_hint=None):  # type: ignore[no-untyped-def]
            image.begin(3)
            return super().write(path, chunks, size_hint)

    with pytest.raises(ImageError, match="WRITING at step 3; step 1 is wanted"):
        upload_image(image, 1, image.description(), [0], Overtaken(tmp_path / "job"), "x.bin")
