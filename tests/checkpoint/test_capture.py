from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from elastic_train.checkpoint.capture import Capture, dtype_of
from elastic_train.checkpoint.errors import ImageError
from elastic_train.checkpoint.image import Image, State, adoptable, image_name
from elastic_train.parallel.shard import LocalShard

ROOT = Path(__file__).resolve().parents[2]


def state() -> dict[str, LocalShard]:
    return {
        "w": LocalShard(torch.arange(15.0).view(5, 3).requires_grad_(), (10, 3), (5, 0)),
        "empty": LocalShard(torch.empty(0, 3), (10, 3), (10, 0)),
        "half": LocalShard(torch.ones(3, dtype=torch.bfloat16), (3,), (0,)),
        "scalar": LocalShard(torch.tensor(4), (), ()),
    }


def test_the_description_has_every_shard_that_is_not_empty_at_aligned_offsets() -> None:
    description = Capture(state()).description
    assert [
        (c.key, c.dtype, c.global_shape, c.offsets, c.sizes, c.byte_offset, c.nbytes) for c in description.chunks
    ] == [
        ("w", "float32", (10, 3), (5, 0), (5, 3), 0, 60),
        ("half", "bfloat16", (3,), (0,), (3,), 64, 6),
        ("scalar", "int64", (), (), (), 128, 8),
    ]
    assert description.nbytes == 192


def test_each_write_takes_the_live_values(tmp_path: Path) -> None:
    shards = state()
    capture = Capture(shards)
    image = Image.create(tmp_path / image_name(1, 0, 0), 1, 0, capture.description)
    for step in (1, 2):
        with torch.no_grad():
            shards["w"].tensor.mul_(2)
        capture.write(image, step)
        image.require(step)
        expected = np.arange(15, dtype=np.float32) * 2**step
        assert np.array_equal(image.data[:60].view(np.float32), expected)
    assert image.data[64:70].tobytes() == b"\x80\x3f" * 3
    assert image.data[128:136].view(np.int64) == 4


def test_what_never_changes_is_written_once_into_each_image(tmp_path: Path) -> None:
    shards = state()
    capture = Capture(shards, {"half"})
    images = [Image.create(tmp_path / image_name(1, 0, buffer), 1, 0, capture.description) for buffer in (0, 1)]
    for step, image in enumerate([*images, *images], 1):
        shards["scalar"].tensor.fill_(step)
        capture.write(image, step)
        image.require(step)
        assert image.data[128:136].view(np.int64) == step
        assert image.data[64:70].tobytes() == b"\x80\x3f" * 3
        shards["half"].tensor.fill_(1.0 if step == 1 else 2.0)  # both have it by then


def test_an_image_of_another_size_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    capture = Capture(state())
    smaller = Capture({"w": state()["w"]})
    image = Image.create(tmp_path / image_name(1, 0, 0), 1, 0, smaller.description)
    smaller.write(image, 1)
    with pytest.raises(ImageError, match="has 64 bytes; the state needs 192"):
        capture.write(image, 2)
    image.require(1)


def test_a_state_of_empty_shards_can_be_captured(tmp_path: Path) -> None:
    capture = Capture({"empty": state()["empty"]})
    image = Image.create(tmp_path / image_name(1, 0, 0), 1, 0, capture.description)
    capture.write(image, 5)
    image.require(5)
    assert image.nbytes == 0


def test_strided_shards_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"shard w of shape \(3, 2\) has strides \(1, 3\)"):
        Capture({"w": LocalShard(torch.zeros(2, 3).t(), (3, 2), (0, 0))})


def test_dtype_of_accepts_dtypes_only() -> None:
    assert dtype_of("float32") is torch.float32
    with pytest.raises(ValueError, match="'nn' is not one"):
        dtype_of("nn")


@pytest.mark.slow
def test_a_writer_killed_at_any_instant_leaves_torn_images_that_show_it_and_the_step_before() -> None:
    rng = random.Random(5)
    torn = mixed = 0
    command = [sys.executable, "-m", "tests.checkpoint.snapshot_writer"]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=ROOT, env=environment
        ) as writers,
    ):
        assert writers.stdin is not None
        assert writers.stdout is not None
        for _ in range(40):
            print(folder, file=writers.stdin)
            pid = int(writers.stdout.readline())
            images = [Image.open(Path(folder) / image_name(1, 0, buffer)) for buffer in range(2)]
            while max(image.step for image in images) < 3:
                pass
            select.select([], [], [], rng.uniform(0, 0.03))  # any instant will do
            os.kill(pid, signal.SIGKILL)
            assert writers.stdout.readline() == "dead\n"
            for image in images:
                values = image.data.view(np.float32)
                lowest, highest = values.min(), values.max()
                if image.whole:
                    assert lowest == highest == image.step
                else:
                    assert image.state is State.WRITING
                    torn += 1
                    mixed += bool(lowest < highest)
            held = [image.step for image in images if image.whole]
            assert held
            assert [found.step for found in adoptable(folder)] == sorted(held)
        writers.stdin.close()
    assert torn > 0
    assert mixed > 0  # else the kills came too late to prove anything
