from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from elastic_train.checkpoint.byte_server import ByteServer
from elastic_train.checkpoint.errors import DamagedChunk, ImageError, RestoreError, SourceError
from elastic_train.checkpoint.image import Image
from elastic_train.checkpoint.reader import Part, restore
from elastic_train.checkpoint.restore_checkpoint import parts_of
from elastic_train.checkpoint.sources import Bytes, ChunkSource, ImageSource, RemoteSource
from elastic_train.parallel.shard import LocalShard
from elastic_train.storage.store import Store
from tests.checkpoint.states import (
    Global,
    State,
    cut,
    emptied,
    even_layout,
    image_parts,
    random_layout,
    same,
    save,
    some_tensors,
    write_images,
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ByteServer]:
    server = ByteServer("127.0.0.1", 0, "token", tmp_path).start()
    yield server
    server.close()


def remote_parts(server: ByteServer, paths: list[Path], step: int) -> list[Part]:
    return [Part(Image.open(p).description(), RemoteSource(server.address, "token", p.name, step)) for p in paths]


def restored_like(states: list[State], parts: list[Part]) -> list[State]:
    """New states of the same places as ``states``, filled from ``parts`` rank by rank."""
    targets = [emptied(state) for state in states]
    for rank, target in enumerate(targets):
        restore(target, parts, rank=rank)
    return targets


@pytest.mark.parametrize("seed", range(60))
def test_any_layout_restores_from_images_of_any_other_bit_for_bit(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    full = some_tensors(seed)
    parts = image_parts(write_images(tmp_path, random_layout(full, rng), step=3), step=3)
    for _ in range(3):
        wanted = random_layout(full, rng)
        assert all(same(a, b) for a, b in zip(restored_like(wanted, parts), wanted, strict=True))


@pytest.mark.parametrize("seed", range(12))
def test_and_from_partners_and_from_storage(seed: int, tmp_path: Path, server: ByteServer) -> None:
    rng = random.Random(1000 + seed)
    full = some_tensors(seed)
    saved = random_layout(full, rng)
    store = Store.open(str(tmp_path / "job"))
    manifest = save(store, tmp_path, saved, step=3)
    paths = sorted(tmp_path.glob("*.img"))
    for parts in (remote_parts(server, paths, 3), parts_of(store, manifest)):
        wanted = random_layout(full, rng)
        assert all(same(a, b) for a, b in zip(restored_like(wanted, parts), wanted, strict=True))


@pytest.mark.parametrize("saved", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("loaded", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_even_splits_with_empty_last_shards(saved: int, loaded: int, dim: int, tmp_path: Path) -> None:
    """FSDP's split of 257 and 7 rows over up to 8 ranks, to and from a split of columns."""
    full = some_tensors(7)
    parts = image_parts(write_images(tmp_path, even_layout(full, saved), step=1), step=1)
    wanted = even_layout(full, loaded, dim)
    assert any(not shard.tensor.numel() for state in even_layout(full, 8) for shard in state.values())
    assert all(same(a, b) for a, b in zip(restored_like(wanted, parts), wanted, strict=True))


def columns(full: Global, begin: int, end: int) -> State:
    width = full["w"].shape[1]
    return {"w": cut(full["w"], [[], sorted({begin, end} - {0, width})], [0, int(begin > 0)])}


def test_progress_is_seen_while_a_large_state_is_read(tmp_path: Path, server: ByteServer) -> None:
    """What takes longer than a hang may is none as long as bytes arrive; one beat per request."""
    full = {"w": torch.arange(400.0).view(20, 20)}
    paths = write_images(tmp_path, even_layout(full, 4), step=1)
    for parts in (remote_parts(server, paths, 1), image_parts(paths, 1)):
        beats: list[int] = []
        target = emptied({"w": cut(full["w"], [[], []], [0, 0])})
        restore(target, parts, on_progress=lambda beats=beats: beats.append(1))
        assert len(beats) == 4


def test_only_what_is_needed_is_read(tmp_path: Path, server: ByteServer) -> None:
    full = {"w": torch.arange(400.0).view(20, 20)}
    paths = write_images(tmp_path, even_layout(full, 4), step=1)
    parts = remote_parts(server, paths, 1)
    rows = {"w": cut(full["w"], [[3, 6], []], [1, 0])}  # rows 3 to 5: 2 of the first part, 1 of the second
    assert restore(emptied(rows), parts).bytes_read == {"remote": 3 * 20 * 4}
    target = emptied(columns(full, 0, 10))
    assert restore(target, parts).bytes_read == {"remote": 20 * 10 * 4}  # half of each row
    assert same(target, columns(full, 0, 10))


def test_the_nearest_copy_is_read(tmp_path: Path, server: ByteServer) -> None:
    full = {"w": torch.randn(6, 5), "v": torch.randn(3)}
    states = even_layout(full, 1)
    store = Store.open(str(tmp_path / "job"))
    stored = parts_of(store, save(store, tmp_path, states, step=2))
    paths = sorted(tmp_path.glob("*.img"))
    far, near = remote_parts(server, paths, 2), image_parts(paths, 2)
    target = emptied(states[0])
    assert restore(target, stored + far + near).bytes_read == {"image": 132}
    assert restore(target, stored + far).bytes_read == {"remote": 132}
    assert restore(target, stored).bytes_read == {"object": 132}
    assert same(target, states[0])


class Counting:
    """A source that counts what is read of it, and can be made to fail."""

    kind: ClassVar[str] = "remote"
    distance: ClassVar[int] = 1

    def __init__(self, inner: ChunkSource, broken: bool = False) -> None:
        self.inner, self.broken, self.nbytes = inner, broken, 0

    def read(self, byte_offset: int, nbytes: int) -> Bytes:
        if self.broken:
            raise SourceError("host 10.0.0.9:1 does not answer: gone")
        self.nbytes += nbytes
        return self.inner.read(byte_offset, nbytes)

    def close(self) -> None:
        self.inner.close()


def test_reads_of_replicas_are_spread_over_their_holders(tmp_path: Path) -> None:
    full = {f"w{i}": torch.randn(16, 4) for i in range(12)}
    replica = even_layout(full, 1)[0]
    paths = write_images(tmp_path, [replica] * 4, step=1)
    loads = []
    for rank in range(4):
        sources = [Counting(ImageSource(path, 1)) for path in paths]
        parts = [Part(Image.open(path).description(), source) for path, source in zip(paths, sources, strict=True)]
        target = emptied(replica)
        assert restore(target, parts, rank=rank).bytes_read == {"remote": 12 * 256}
        assert same(target, replica)
        loads.append([source.nbytes for source in sources])
    assert sorted(loads[0]) == [3 * 256] * 4
    assert np.array(loads).sum(axis=0).tolist() == [12 * 256] * 4


def test_ranks_that_need_one_chunk_ask_different_holders(tmp_path: Path) -> None:
    replica = even_layout({"w": torch.randn(10, 4)}, 1)[0]
    paths = write_images(tmp_path, [replica] * 3, step=1)
    asked = []
    for rank in range(3):
        sources = [Counting(ImageSource(path, 1)) for path in paths]
        parts = [Part(Image.open(path).description(), source) for path, source in zip(paths, sources, strict=True)]
        restore(emptied(replica), parts, rank=rank)
        asked.append([source.nbytes for source in sources].index(160))
    assert sorted(asked) == [0, 1, 2]


def test_a_lost_host_is_passed_over_for_the_next_copy_and_reported(tmp_path: Path) -> None:
    replica = even_layout(some_tensors(1), 1)[0]
    paths = write_images(tmp_path, [replica] * 2, step=1)
    description = Image.open(paths[0]).description()
    broken = Part(description, Counting(ImageSource(paths[0], 1), broken=True))
    target = emptied(replica)
    result = restore(target, [broken, Part(description, Counting(ImageSource(paths[1], 1)))])
    assert same(target, replica)
    assert result.passed_over == ["host 10.0.0.9:1 does not answer: gone"]
    with pytest.raises(SourceError, match=r"10\.0\.0\.9"):
        restore(target, [broken])


def test_a_host_that_does_not_answer_is_waited_for_once(tmp_path: Path) -> None:
    replica = even_layout({f"w{n}": torch.randn(1024, 1024) for n in range(8)}, 1)[0]
    paths = write_images(tmp_path, [replica], step=1)
    description = Image.open(paths[0]).description()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = RemoteSource(listener.getsockname()[:2], "token", paths[0].name, 1, timeout=0.2)
        target = emptied(replica)
        result = restore(target, [Part(description, silent), Part(description, Counting(ImageSource(paths[0], 1)))])
        assert same(target, replica)
        assert len(result.passed_over) == 1
        assert "does not answer: timed out" in result.passed_over[0]
        listener.setblocking(False)
        listener.accept()[0].close()
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_torn_partner_copy_falls_back_to_storage(tmp_path: Path, server: ByteServer) -> None:
    states = even_layout(some_tensors(2), 2)
    store = Store.open(str(tmp_path / "job"))
    stored = parts_of(store, save(store, tmp_path, states, step=2))
    paths = sorted(tmp_path.glob("*.img"))
    far = remote_parts(server, paths, 2)
    Image.open(paths[1], write=True).begin(3)
    target = emptied(even_layout(some_tensors(2), 1)[0])
    result = restore(target, stored + far)
    assert same(target, even_layout(some_tensors(2), 1)[0])
    assert set(result.bytes_read) == {"object", "remote"}
    assert len(result.passed_over) == 1
    assert "WRITING at step 3; step 2 is wanted" in result.passed_over[0]


def test_an_image_that_is_overwritten_meanwhile_is_noticed(tmp_path: Path) -> None:
    states = even_layout(some_tensors(2), 1)
    paths = write_images(tmp_path, states, step=2)
    parts = image_parts(paths, 2)
    Image.open(paths[0], write=True).begin(3)
    for of in (parts, image_parts(paths, 2)):
        with pytest.raises(ImageError, match="WRITING at step 3; step 2 is wanted"):
            restore(emptied(states[0]), of)


def test_everything_that_does_not_fit_is_listed_and_nothing_is_copied(tmp_path: Path) -> None:
    full = {"a": torch.ones(4), "b": torch.ones(4, 2), "c": torch.ones(6), "d": torch.ones(2)}
    states = even_layout(full, 2)
    parts = image_parts(write_images(tmp_path, states, step=1), step=1)
    target = {
        "a": LocalShard(torch.zeros(4, dtype=torch.bfloat16), (4,), (0,)),
        "b": LocalShard(torch.zeros(2, 4), (2, 4), (0, 0)),
        "c": LocalShard(torch.zeros(6), (6,), (0,)),
        "new": LocalShard(torch.zeros(3), (3,), (0,)),
    }
    with pytest.raises(RestoreError) as caught:
        restore(target, [parts[0]], expected_keys=target.keys())
    assert sorted(caught.value.problems) == [
        "a is saved as float32; this job has bfloat16",
        "b is saved with shape (4, 2); this job has (2, 4)",
        "c: only 3 of the 6 elements at offsets (0,) are saved",
        "d is in the saved state but not in this job",
        "new is missing from the saved state",
    ]
    assert all(not shard.tensor.any() for shard in target.values())


def test_parts_of_different_dtypes_are_refused_also_when_the_first_copy_fits(tmp_path: Path) -> None:
    paths = [
        *write_images(tmp_path, even_layout({"a": torch.ones(4)}, 1), step=1),
        *write_images(tmp_path, even_layout({"a": torch.ones(4).bfloat16()}, 1), step=1, generation=2),
    ]
    with pytest.raises(RestoreError, match="a is saved as bfloat16; this job has float32"):
        restore({"a": LocalShard(torch.zeros(4), (4,), (0,))}, image_parts(paths, 1))


def test_chunks_of_different_cuts_may_overlap(tmp_path: Path) -> None:
    full = {"a": torch.arange(20.0).view(10, 2)}
    thirds, halves = even_layout(full, 3), even_layout(full, 2)
    paths = write_images(tmp_path, [thirds[0], halves[1], thirds[2]], step=1)
    (wanted,) = even_layout(full, 1)
    with pytest.raises(RestoreError, match=r"a: only 18 of the 20 elements at offsets \(0, 0\) are saved"):
        restore(emptied(wanted), image_parts(paths, 1))
    paths += write_images(tmp_path, [halves[0]], step=1, generation=2)
    target = emptied(wanted)
    restore(target, image_parts(paths, 1))
    assert same(target, wanted)


def test_keys_of_other_pipeline_stages_are_not_extra(tmp_path: Path) -> None:
    full = {"a": torch.ones(4), "b": torch.ones(4)}
    states = even_layout(full, 1)
    parts = image_parts(write_images(tmp_path, states, step=1), step=1)
    stage = {"a": emptied(states[0])["a"]}
    restore(stage, parts, expected_keys={"a", "b"})
    assert torch.equal(stage["a"].tensor, torch.ones(4))


def test_a_rank_without_elements_of_a_tensor_still_checks_its_dtype(tmp_path: Path) -> None:
    parts = image_parts(write_images(tmp_path, even_layout({"a": torch.ones(4)}, 1), step=1), step=1)
    with pytest.raises(RestoreError, match="a is saved as float32; this job has float64"):
        restore({"a": LocalShard(torch.empty(0, dtype=torch.float64), (4,), (4,))}, parts)


def test_a_flipped_byte_in_storage_is_refused_by_tensor_object_and_range(tmp_path: Path) -> None:
    states = even_layout({"a": torch.ones(4), "b": torch.ones(100)}, 1)
    store = Store.open(str(tmp_path / "job"))
    manifest = save(store, tmp_path, states, step=2)
    path = next(iter(manifest.objects))
    content = bytearray(store.read(path))
    content[16 + 50] ^= 1
    store.write(path, [content])
    with pytest.raises(DamagedChunk) as caught:
        restore(emptied(states[0]), parts_of(store, manifest))
    damage = caught.value.damage
    assert (damage.tensor, damage.object, damage.byte_offset, damage.nbytes) == ("b", path, 16, 400)
    assert damage.expected == f"xxh3 {manifest.tensors['b'].chunks[0].xxh3[0]}"
    assert damage.actual.startswith("xxh3 ")
    assert damage.actual != damage.expected


@pytest.mark.parametrize(("cut_to", "found"), [(-1, "an object of 415 bytes"), (None, "no such object")])
def test_a_truncated_or_missing_object_is_refused_by_name(tmp_path: Path, cut_to: int | None, found: str) -> None:
    states = even_layout({"a": torch.ones(4), "b": torch.ones(100)}, 1)
    store = Store.open(str(tmp_path / "job"))
    manifest = save(store, tmp_path, states, step=2)
    path = next(iter(manifest.objects))
    content = store.read(path)
    store.delete(path)
    if cut_to is not None:
        store.write(path, [content[:cut_to]])
    with pytest.raises(DamagedChunk, match=f"object {path}, bytes .* found {found}") as caught:
        restore(emptied(states[0]), parts_of(store, manifest))
    assert caught.value.damage.tensor == ("b" if cut_to is not None else "a")


def test_neighbouring_chunks_are_fetched_together(tmp_path: Path) -> None:
    states = even_layout({f"w{i:03d}": torch.randn(64, 64) for i in range(100)}, 1)
    store = Store.open(str(tmp_path / "job"))
    requests = []

    class Watching:
        kind: ClassVar[str] = "object"
        distance: ClassVar[int] = 2

        def __init__(self, inner: ChunkSource) -> None:
            self.inner = inner

        def read(self, byte_offset: int, nbytes: int) -> Bytes:
            requests.append(nbytes)
            return self.inner.read(byte_offset, nbytes)

        def close(self) -> None: ...

    parts = [
        replace(part, source=Watching(part.source)) for part in parts_of(store, save(store, tmp_path, states, step=2))
    ]
    target = emptied(states[0])
    restore(target, parts)
    assert requests == [100 * 64 * 64 * 4]
    assert same(target, states[0])
