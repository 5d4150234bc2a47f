from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_train.checkpoint.capture import Capture
from elastic_train.checkpoint.errors import NoRoom
from elastic_train.checkpoint.image import Image, image_name
from elastic_train.controller.agreement import Agreement
from elastic_train.controller.control_block import ControlBlock
from elastic_train.controller.snapshots import Snapshots
from elastic_train.parallel.shard import LocalShard
from tests.small_memory import can_mount, mounted

ELEMENTS = 50_000  # 200 KB


class Rank:
    """A trainer's side of snapshots, with the host's part in the test's hands."""

    def __init__(self, folder: Path, keep: tuple[str, ...] = ()) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.weights = torch.zeros(ELEMENTS)
        self.control = ControlBlock(str(folder / "control"), create=True)
        self.control.allow(0, 0)
        self.told: list[dict[str, Any]] = []
        self.heard = threading.Condition()
        capture = Capture({"w": LocalShard(self.weights, (ELEMENTS,), (0,))})
        agreement = Agreement(self.control, lambda: None)
        self.snapshots = Snapshots(capture, self.control, agreement.wait, self._tell, folder, 7, 0, keep)

    def _tell(self, message: dict[str, Any]) -> None:
        with self.heard:
            self.told.append(message)
            self.heard.notify_all()

    def hear(self, count: int) -> dict[str, Any]:
        with self.heard:
            assert self.heard.wait_for(lambda: len(self.told) >= count, 60)
            return self.told[count - 1]

    def step(self, step: int) -> None:
        """As the trainer does it: the state changes only after ``wait``."""
        self.snapshots.wait()
        self.weights.fill_(step)
        self.snapshots.begin(step, {"type": "stepped", "step": step})

    def image(self, buffer: int) -> Image:
        return Image.open(self.folder / image_name(7, 0, buffer))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Room for two images and a half."""
    assert can_mount(tmp_path / "probe"), "this test needs root, to mount a small tmpfs"
    with mounted(tmp_path / "small", 2.5 * 4 * ELEMENTS):
        yield tmp_path / "small"


def test_a_step_is_told_when_its_image_is_whole(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.step(1)
    told = rank.hear(1)
    assert (told["type"], told["step"], told["buffer"], told["image"]) == ("stepped", 1, 0, image_name(7, 0, 0))
    assert told["snapshot_seconds"] > 0
    image = rank.image(0)
    image.require(1)
    assert (image.data.view("float32")[:ELEMENTS] == 1).all()


def test_an_image_is_written_over_only_when_the_step_after_it_is_finished(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.step(1)
    rank.hear(1)
    rank.step(2)
    assert rank.image(0).step == 1
    rank.control.allow(1, 1)
    assert rank.hear(2)["buffer"] == 1
    rank.image(0).require(1)
    rank.image(1).require(2)
    rank.step(3)
    rank.control.allow(2, 0)
    assert rank.hear(3)["buffer"] == 0
    rank.snapshots.wait()
    rank.image(0).require(3)
    rank.image(1).require(2)


def test_wait_returns_only_when_the_copy_is_done(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.step(1)
    rank.step(2)  # its copy waits for step 1 to be finished
    waited = threading.Event()
    waiter = threading.Thread(target=lambda: (rank.snapshots.wait(), waited.set()))
    waiter.start()
    assert not waited.wait(0.05)
    rank.control.allow(1, 1)
    assert waited.wait(60)
    waiter.join()
    rank.image(1).require(2)


def test_without_room_for_two_images_the_next_update_fails_with_the_sentence(tmp_path: Path) -> None:
    assert can_mount(tmp_path / "probe"), "this test needs root, to mount a small tmpfs"
    with mounted(tmp_path / "small", 1.5 * 4 * ELEMENTS):
        rank = Rank(tmp_path / "small")
        with pytest.raises(NoRoom, match=r"g00000007-r00000-b1.img needs 204096 bytes and .* has \d+ free"):
            rank.step(1)
        del rank


def test_older_images_make_room_except_for_those_that_are_needed(small: Path) -> None:
    old = Capture({"w": LocalShard(torch.zeros(ELEMENTS), (ELEMENTS,), (0,))}).description
    kept, useless = (image_name(6, 0, buffer) for buffer in range(2))
    for name in (kept, useless):
        Image.create(small / name, 6, 0, old)
    rank = Rank(small, keep=(kept,))
    with pytest.raises(NoRoom):  # one had room, then there was nothing left to remove
        rank.step(1)
    assert sorted(path.name for path in small.glob("*.img")) == [kept, image_name(7, 0, 0)]


def test_a_third_buffer_without_room_is_given_back_to_the_host(small: Path) -> None:
    rank = Rank(small)
    rank.step(1)
    rank.hear(1)
    rank.control.allow(1, 2)  # buffer 1 is being uploaded
    rank.step(2)
    refused = rank.hear(2)
    assert (refused["type"], refused["buffer"]) == ("no_buffer", 2)
    assert "b2.img needs" in refused["error"]
    rank.control.allow(1, 1)  # the upload was given up
    assert rank.hear(3)["buffer"] == 1
    rank.snapshots.wait()
    rank.image(1).require(2)
