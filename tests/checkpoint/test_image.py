from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_train.checkpoint.description import Chunk, Description
from elastic_train.checkpoint.errors import ImageError, NoRoom
from elastic_train.checkpoint.image import (
    HEADER_BYTES,
    Image,
    State,
    adoptable,
    description_path,
    image_name,
    parse_image_name,
    remove_older,
)


def description(nbytes: int = 4096) -> Description:
    return Description((Chunk("w", "float32", (nbytes // 4,), (0,), (nbytes // 4,), 0, nbytes),), nbytes)


def whole_image(directory: Path, generation: int = 1, rank: int = 0, step: int = 3) -> Image:
    image = Image.create(directory / image_name(generation, rank, 0), generation, rank, description())
    image.begin(step)
    image.data[:] = step
    image.finish(step)
    return image


def test_an_image_goes_from_empty_to_writing_to_whole(tmp_path: Path) -> None:
    image = Image.create(tmp_path / image_name(3, 2, 1), 3, 2, description())
    assert (image.state, image.step, image.whole) == (State.EMPTY, -1, False)
    image.begin(7)
    other = Image.open(image.path)
    assert (other.state, other.step, other.whole) == (State.WRITING, 7, False)
    image.data[:] = 9
    image.finish(7)
    assert (other.state, other.step, other.whole) == (State.WHOLE, 7, True)
    assert (other.generation, other.rank, other.nbytes) == (3, 2, 4096)
    assert (other.data == 9).all()
    assert other.description() == description()


def test_only_the_step_that_was_begun_can_be_finished(tmp_path: Path) -> None:
    image = Image.create(tmp_path / image_name(1, 0, 0), 1, 0, description())
    with pytest.raises(ImageError, match="EMPTY at step -1; it cannot be finished as step 5"):
        image.finish(5)
    image.begin(4)
    with pytest.raises(ImageError, match="WRITING at step 4; it cannot be finished as step 5"):
        image.finish(5)


def test_require_refuses_torn_images_and_other_steps(tmp_path: Path) -> None:
    image = whole_image(tmp_path, step=3)
    image.require(3)
    with pytest.raises(ImageError, match="WHOLE at step 3; step 4 is wanted"):
        image.require(4)
    image.begin(4)
    with pytest.raises(ImageError, match="WRITING at step 4"):
        image.require(4)


def test_a_reader_cannot_change_the_file(tmp_path: Path) -> None:
    path = whole_image(tmp_path).path
    reader = Image.open(path)
    reader.data[:] = 200
    assert (Image.open(path).data == 3).all()


def test_views_stay_valid_after_close(tmp_path: Path) -> None:
    image = whole_image(tmp_path)
    view = image.data[10:20]
    image.close()
    assert (view == 3).all()


def test_creating_anew_leaves_open_readers_the_old_bytes(tmp_path: Path) -> None:
    old = Image.open(whole_image(tmp_path).path)
    Image.create(old.path, 1, 0, description())
    assert old.whole
    assert (old.data == 3).all()
    assert Image.open(old.path).state is State.EMPTY


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = whole_image(tmp_path).path
    content = path.read_bytes()
    with pytest.raises(ImageError, match="No such file"):
        Image.open(tmp_path / "absent.img")
    path.write_bytes(content[:-1])
    with pytest.raises(ImageError, match=f"has {HEADER_BYTES + 4095} bytes; its header says {HEADER_BYTES + 4096}"):
        Image.open(path)
    path.write_bytes(content[:100])
    with pytest.raises(ImageError, match="less than the 4096"):
        Image.open(path)
    path.write_bytes(b"\0" * len(content))
    with pytest.raises(ImageError, match="not a snapshot image"):
        Image.open(path)
    path.write_bytes(content[:128] + b"\xff" + content[129:])
    with pytest.raises(ImageError, match="unknown state 255"):
        _ = Image.open(path).state


def test_a_host_adopts_whole_images_with_their_descriptions_only(tmp_path: Path) -> None:
    whole_image(tmp_path, generation=2, rank=1, step=9)
    whole_image(tmp_path, generation=1, rank=0, step=8)
    whole_image(tmp_path, rank=2).begin(10)
    Image.create(tmp_path / image_name(1, 3, 0), 1, 3, description())
    description_path(whole_image(tmp_path, rank=4).path).unlink()
    description_path(whole_image(tmp_path, rank=5).path).write_text(description(8192).to_json())
    (tmp_path / image_name(1, 6, 0)).write_bytes(b"junk")
    found = [(image.generation, image.rank, image.step, image.description) for image in adoptable(tmp_path)]
    assert found == [(1, 0, 8, description()), (2, 1, 9, description())]


def test_older_generations_are_removed_with_what_belongs_to_them(tmp_path: Path) -> None:
    for generation in (1, 2, 3):
        whole_image(tmp_path, generation=generation)
    (tmp_path / f".{image_name(1, 0, 1)}.77").touch()
    (tmp_path / "notes.txt").touch()
    assert remove_older(tmp_path, 3) == 2
    name = image_name(3, 0, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, f"{name}.json", "notes.txt"]


def test_images_that_are_still_needed_are_not_removed(tmp_path: Path) -> None:
    for rank in range(3):
        whole_image(tmp_path, generation=2, rank=rank)
    kept = image_name(2, 1, 0)
    assert remove_older(tmp_path, 3, keep=[kept]) == 2
    assert [(found.rank, found.description) for found in adoptable(tmp_path)] == [(1, description())]


@pytest.mark.parametrize("name", ["../x.img", "g1-r1-b0.img", "/etc/passwd", "g00000001-r00000-b0.img.json", ""])
def test_names_that_are_not_image_names_are_refused(name: str) -> None:
    with pytest.raises(ImageError, match="image name"):
        parse_image_name(name)


def test_names_round_trip() -> None:
    assert parse_image_name(image_name(12, 345, 1)) == (12, 345, 1)
    assert parse_image_name(image_name(123456789, 123456, 0)) == (123456789, 123456, 0)


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    """A memory file system of 1 MiB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small tmpfs needs root")
    target = tmp_path / "small"
    target.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield target
    subprocess.run(["umount", "--lazy", str(target)], check=True)


def test_a_full_memory_file_system_is_an_error_sentence_at_creation(small_file_system: Path) -> None:
    fits = Image.create(small_file_system / image_name(1, 0, 0), 1, 0, description(600_000 // 64 * 64))
    path = small_file_system / image_name(1, 0, 1)
    with pytest.raises(
        NoRoom, match=rf"{path} needs 604096 bytes and .* has \d+ free; give snapshot.directory more room"
    ):
        Image.create(path, 1, 0, description(600_000))
    assert sorted(p.name for p in small_file_system.iterdir()) == [fits.path.name, f"{fits.path.name}.json"]
    fits.begin(1)
    fits.data[:] = 1  # every page was there from the beginning
    fits.finish(1)
