from __future__ import annotations

import random

import numpy as np
import pytest

from elastic_train.checkpoint.description import Chunk, Description, aligned, union_volume
from elastic_train.checkpoint.errors import CheckpointError


def rows(begin: int, end: int, key: str = "w") -> Description:
    nbytes = (end - begin) * 12
    return Description((Chunk(key, "float32", (10, 3), (begin, 0), (end - begin, 3), 0, nbytes),), aligned(nbytes))


def test_json_gives_the_same_description_back() -> None:
    description = Description(
        (
            Chunk("param.a", "float32", (4, 3), (2, 0), (2, 3), 0, 24),
            Chunk("scalar", "bfloat16", (), (), (), 64, 2),
        ),
        128,
    )
    assert Description.from_json(description.to_json()) == description


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"nbytes":1}',
        '{"nbytes":-1,"chunks":[]}',
        '{"nbytes":64,"chunks":[["w","float32",[4],[0],[5],0,20]]}',
        '{"nbytes":64,"chunks":[["w","float32",[4],[0,0],[4],0,16]]}',
        '{"nbytes":64,"chunks":[["w","float32",[4],[0],[4],56,16]]}',
        '{"nbytes":64,"chunks":[["w","float32",[4],[0],[4],"0",16]]}',
    ],
)
def test_text_that_is_no_description_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError):
        Description.from_json(text)


@pytest.mark.parametrize("seed", range(30))
def test_union_volume_is_what_painting_the_boxes_gives(seed: int) -> None:
    rng = random.Random(seed)
    shape = [rng.randint(1, 7) for _ in range(rng.randint(1, 3))]
    painted = np.zeros(shape, dtype=bool)
    boxes = []
    for _ in range(rng.randint(0, 6)):
        offsets = tuple(rng.randint(0, n) for n in shape)
        sizes = tuple(rng.randint(0, n - o) for n, o in zip(shape, offsets, strict=True))
        painted[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] = True
        boxes.append((offsets, sizes))
    assert union_volume(boxes) == painted.sum()


def test_union_volume_of_a_scalar() -> None:
    assert union_volume([((), ()), ((), ())]) == 1
    assert union_volume([]) == 0
