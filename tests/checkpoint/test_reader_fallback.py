"""What is lost, torn, damaged or overwritten comes from the next copy, within one ``restore``, which says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from elastic_train.checkpoint.byte_server import ByteServer
from elastic_train.checkpoint.capture import describe
from elastic_train.checkpoint.errors import DamagedChunk, ImageError, SourceError
from elastic_train.checkpoint.image import Image, description_path
from elastic_train.checkpoint.manifest import Manifest
from elastic_train.checkpoint.reader import Part, Restored, restore
from elastic_train.checkpoint.restore_checkpoint import parts_of
from elastic_train.checkpoint.sources import Bytes, ImageSource, ObjectSource, RemoteSource
from elastic_train.checkpoint.verified import MOST_REREADS, REREADS, read_verified
from elastic_train.storage.store import Store
from tests.checkpoint.states import State, emptied, even_layout, same, save, some_tensors


@dataclass
class Tiers:
    """One state in images of three ranks on this node, on a partner's (copies of them), and in storage."""

    states: list[State]
    images: list[Path]
    copies: list[Path]
    server: ByteServer
    store: Store
    manifest: Manifest

    def parts(self, image: type[ImageSource] = ImageSource) -> list[Part]:
        """The descriptions are those that the coordinator has, whatever became of the files."""
        described = [describe(state) for state in self.states]
        near = [Part(d, image(path, 2)) for d, path in zip(described, self.images, strict=True)]
        remote = [RemoteSource(self.server.address, "token", path.name, 2) for path in self.copies]
        far = [Part(d, source) for d, source in zip(described, remote, strict=True)]
        return near + far + parts_of(self.store, self.manifest)

    @property
    def total(self) -> int:
        return sum(tensor.nbytes for tensor in some_tensors(2).values())

    def restore(self, parts: list[Part]) -> Restored:
        """Into one rank that needs all of it; the state must be right."""
        (wanted,) = even_layout(some_tensors(2), 1)
        target = emptied(wanted)
        restored = restore(target, parts)
        assert same(target, wanted)
        return restored


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    states = even_layout(some_tensors(2), 3)
    store = Store.open(str(tmp_path / "job"))
    for folder in ("near", "partner"):
        (tmp_path / folder).mkdir()
    manifest = save(store, tmp_path / "near", states, step=2)
    images = sorted((tmp_path / "near").glob("*.img"))
    for path in images:
        for file in (path, description_path(path)):
            (tmp_path / "partner" / file.name).write_bytes(file.read_bytes())
    server = ByteServer("127.0.0.1", 0, "token", tmp_path / "partner").start()
    copies = [tmp_path / "partner" / path.name for path in images]
    yield Tiers(states, images, copies, server, store, manifest)
    server.close()


def overwrite(path: Path, step: int = 3) -> None:
    """What the trainer of the next generation does to an old buffer."""
    image = Image.open(path, write=True)
    image.begin(step)
    image.data[:] = 0xAB


def flip(store: Store, path: str, at: int) -> None:
    content = bytearray(store.read(path))
    content[at] ^= 1
    store.write(path, [content])


def test_all_images_whole(tiers: Tiers) -> None:
    restored = tiers.restore(tiers.parts())
    assert (set(restored.bytes_read), restored.passed_over) == ({"image"}, [])


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.unlink(), "cannot be opened: No such file"),
        (lambda path: path.write_bytes(b"x" * 5000), "is not a snapshot image"),
        (lambda path: path.write_bytes(b""), "has 0 bytes, less than the 4096"),
        (overwrite, "WRITING at step 3; step 2 is wanted"),
    ],
    ids=["gone", "garbage", "empty", "overwritten"],
)
def test_an_image_that_is_no_good_is_had_from_the_partner_and_then_from_storage(
    tiers: Tiers, spoil: Callable[[Path], None], reason: str
) -> None:
    only_there = sum(shard.tensor.nbytes for shard in tiers.states[1].values() if shard.tensor.ndim)
    spoil(tiers.images[1])
    restored = tiers.restore(tiers.parts())
    assert restored.bytes_read["remote"] == only_there
    assert restored.bytes_read["image"] == tiers.total - only_there
    assert len(restored.passed_over) == 1
    assert reason in restored.passed_over[0]
    spoil(tiers.copies[1])
    restored = tiers.restore(tiers.parts())
    assert restored.bytes_read == {"image": tiers.total - only_there, "object": only_there}
    assert len(restored.passed_over) == 2
    assert "refused" in restored.passed_over[1]


def test_when_all_copies_are_lost_the_last_reason_is_raised(tiers: Tiers) -> None:
    for path in (tiers.images[1], tiers.copies[1]):
        path.unlink()
    parts = tiers.parts()
    with pytest.raises(SourceError, match=r"refused: .* cannot be opened"):
        tiers.restore(parts[:6])
    with pytest.raises(ImageError, match="cannot be opened: No such file"):
        tiers.restore(parts[:3])


class OverwrittenMeanwhile(ImageSource):
    """The buffer of the second image is written over after its last read; what was read is a mix of steps."""

    def check(self) -> None:
        if self._path.name.startswith("g00000001-r00001"):
            overwrite(self._path)
        super().check()


def test_what_came_from_an_image_that_was_overwritten_meanwhile_is_read_again(tiers: Tiers) -> None:
    restored = tiers.restore(tiers.parts(OverwrittenMeanwhile))
    only_there = sum(shard.tensor.nbytes for shard in tiers.states[1].values() if shard.tensor.ndim)
    assert restored.bytes_read == {"image": tiers.total - only_there, "remote": only_there}
    (reason,) = restored.passed_over
    assert "WRITING at step 3; step 2 is wanted" in reason
    with pytest.raises(ImageError, match="WRITING at step 3"):
        tiers.restore(tiers.parts(OverwrittenMeanwhile)[:3])


class SpoiltOnTheWay(ObjectSource):
    """Flips a bit of each answer but every n-th, never the same twice."""

    def __init__(self, source: ObjectSource, right: int, generator: np.random.Generator) -> None:
        super().__init__(source._store, source.path)
        self._right, self._generator = right, generator
        self.requests: list[tuple[int, int]] = []

    def read(self, byte_offset: int, nbytes: int) -> Bytes:
        data = super().read(byte_offset, nbytes)
        self.requests.append((byte_offset, nbytes))
        if len(self.requests) % self._right:
            data[self._generator.integers(nbytes)] ^= 1 << self._generator.integers(8)
        return data


def through(parts: list[Part], right: int) -> list[Part]:
    generator = np.random.default_rng(1)
    stored = [part for part in parts if isinstance(part.source, ObjectSource)]
    return [replace(part, source=SpoiltOnTheWay(part.source, right, generator)) for part in stored]  # type: ignore[arg-type]


@pytest.mark.parametrize("right", [2, 5, 9])
def test_bytes_spoilt_on_the_way_from_storage_never_count_as_damage(tiers: Tiers, right: int) -> None:
    """Four of five answers with a wrong bit, and eight of nine: the right ones are waited for."""
    parts = through(tiers.parts(), right)
    restored = tiers.restore(parts)
    assert restored.passed_over == []
    read = sum(nbytes for part in parts for _, nbytes in part.source.requests)  # type: ignore[attr-defined]
    assert restored.bytes_read == {"object": read}
    assert read > tiers.total


def test_only_wrong_blocks_are_read_again(tmp_path: Path) -> None:
    (wanted,) = even_layout({"w": torch.randn(700_000)}, 1)
    store = Store.open(str(tmp_path / "job"))
    (part,) = through(parts_of(store, save(store, tmp_path, [wanted], step=2)), right=2)
    target = emptied(wanted)
    restore(target, [part])
    assert same(target, wanted)
    first, again = part.source.requests  # type: ignore[attr-defined]
    assert first == (0, 2_800_000)
    assert again[0] % 2**20 == 0
    assert again[1] in (2**20, 2_800_000 - 2 * 2**20)


def test_answers_that_are_always_wrong_and_never_the_same_say_nothing_about_the_object(tiers: Tiers) -> None:
    parts = through(tiers.parts(), right=10**9)
    with pytest.raises(SourceError, match=rf"arrived {1 + MOST_REREADS} times with wrong xxh3, \d+ different ones"):
        tiers.restore(parts)


class Farther(ObjectSource):
    """A copy that nobody reads without need."""

    distance: ClassVar[int] = 3


def test_a_damaged_chunk_is_had_from_a_farther_copy_and_named(tiers: Tiers) -> None:
    key, chunk = "param.embed.weight", tiers.manifest.tensors["param.embed.weight"].chunks[1]
    stored = parts_of(tiers.store, tiers.manifest)
    (part,) = [part for part in stored if part.source.path == chunk.object]  # type: ignore[attr-defined]
    tiers.store.write("copy.bin", [tiers.store.read(chunk.object)])
    flip(tiers.store, chunk.object, chunk.byte_offset + 9)
    restored = tiers.restore([*stored, replace(part, source=Farther(tiers.store, "copy.bin"))])
    (reason,) = restored.passed_over
    end = chunk.byte_offset + chunk.nbytes
    assert reason.startswith(f"object {chunk.object}, bytes {chunk.byte_offset} to {end} (tensor {key}): expected xxh3")
    with pytest.raises(DamagedChunk) as caught:
        tiers.restore(stored)
    assert str(caught.value) == reason
    with pytest.raises(DamagedChunk, match=chunk.object):
        read_verified(tiers.store, key, chunk, tiers.manifest.block_bytes)


def test_damage_is_told_from_spoilt_bytes_by_reading_again(tiers: Tiers) -> None:
    """The same wrong bytes came once and three times again; the sound chunks beside it were read once."""
    chunk = tiers.manifest.tensors["param.embed.weight"].chunks[1]
    flip(tiers.store, chunk.object, chunk.byte_offset + 9)
    parts = through(tiers.parts(), right=1)
    with pytest.raises(DamagedChunk):
        tiers.restore(parts)
    requests = [r for part in parts for r in part.source.requests if part.source.path == chunk.object]  # type: ignore[attr-defined]
    assert len(requests) == 1 + REREADS
    assert set(requests[1:]) == {(chunk.byte_offset, chunk.nbytes)}


def test_damage_in_storage_is_no_matter_where_an_image_is_whole(tiers: Tiers) -> None:
    for path in tiers.manifest.objects:
        flip(tiers.store, path, 5)
    assert tiers.restore(tiers.parts()).passed_over == []
