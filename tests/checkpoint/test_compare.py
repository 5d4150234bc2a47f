from __future__ import annotations

import math
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from elastic_train.checkpoint.compare import Comparison, Saved, compare
from elastic_train.checkpoint.elements import difference
from elastic_train.checkpoint.errors import DamagedChunk
from elastic_train.storage.store import Store
from tests.checkpoint.states import Global, State, even_layout, random_layout, save_and_commit, some_tensors


def saved(folder: Path, states: list[State], step: int = 10) -> Saved:
    store = Store.open(str(folder / "job"))
    return Saved(store, save_and_commit(store, folder, states, step))


def both(tmp_path: Path, left: list[State], right: list[State], cell_bytes: int = 2**20) -> Comparison:
    places = tmp_path / "left", tmp_path / "right"
    for place in places:
        place.mkdir(parents=True)
    return compare(saved(places[0], left), saved(places[1], right), cell_bytes=cell_bytes)


def changed(full: Global, key: str, places: int, by: float) -> Global:
    """``by`` added to every third element of the first ones of ``key``."""
    tensor = full[key].clone()
    tensor.view(-1)[: 3 * places : 3] += by
    return full | {key: tensor}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("cell_bytes", [16, 1000])
def test_equal_states_in_two_layouts_are_equal_and_every_byte_is_read_once(
    tmp_path: Path, seed: int, cell_bytes: int
) -> None:
    rng = random.Random(seed)
    full = some_tensors(1)
    found = both(tmp_path, random_layout(full, rng), random_layout(full, rng), cell_bytes)
    assert found.same
    assert (found.equal, found.tensors, found.unlike, found.only) == (len(full), {}, {}, ([], []))
    assert found.read_bytes <= 2 * sum(tensor.nbytes for tensor in full.values())
    assert set(found.metadata) <= {"layout.dp_shard"}


@pytest.mark.parametrize("ranks", [(2, 2), (1, 3), (3, 2)])
@pytest.mark.parametrize("dim", [0, 1])
def test_elements_that_differ_are_counted_and_their_distance_is_exact(
    tmp_path: Path, ranks: tuple[int, int], dim: int
) -> None:
    full = some_tensors(1)
    other = changed(changed(full, "param.embed.weight", 50, 2.0**-3), "param.half", 5, 1.0)
    other |= {"count": full["count"] + 7}
    found = both(tmp_path, even_layout(full, ranks[0]), even_layout(other, ranks[1], dim), 500)
    assert not found.same
    assert set(found.tensors) == {"param.embed.weight", "param.half", "count"}
    assert found.equal == len(full) - 3
    for key, count in (("param.embed.weight", 50), ("param.half", 5), ("count", 1)):
        a, b = full[key].double(), other[key].double()
        assert found.tensors[key].differing == count
        assert found.tensors[key].absolute == (a - b).abs().max().item()
        relative = (a - b).abs() / torch.maximum(a.abs(), b.abs())
        assert found.tensors[key].relative == pytest.approx(relative[a != b].max().item(), rel=1e-12)


def test_no_byte_of_equal_blocks_is_read(tmp_path: Path) -> None:
    """The objects are not even there."""
    for name in ("left", "right"):
        (tmp_path / name).mkdir()
    sides = [saved(tmp_path / name, even_layout(some_tensors(1), 3)) for name in ("left", "right")]
    for side in sides:
        for path in side.manifest.objects:
            side.store.delete(path)
    found = compare(*sides)
    assert (found.same, found.read_bytes) == (True, 0)


def test_of_a_large_chunk_only_the_block_that_differs_is_read(tmp_path: Path) -> None:
    full = {"param.w": torch.zeros(5, 2**18)}  # a block is a row
    other = {"param.w": full["param.w"].clone()}
    other["param.w"][3, 77] = -2.0
    found = both(tmp_path, even_layout(full, 1), even_layout(other, 1))
    assert found.read_bytes == 2 * 2**20
    (difference,) = found.tensors.values()
    assert (difference.differing, difference.absolute, difference.relative) == (1, 2.0, 1.0)


def test_tensors_of_one_side_and_of_other_shapes_and_dtypes_are_named(tmp_path: Path) -> None:
    full = some_tensors(1)
    other = {key: tensor for key, tensor in full.items() if key != "scalar"}
    other |= {"new": torch.ones(2), "param.half": full["param.half"].float(), "count": torch.tensor([1, 2])}
    found = both(tmp_path, even_layout(full, 2), even_layout(other, 2))
    assert found.only == (["scalar"], ["new"])
    assert found.unlike == {
        "param.half": ("bfloat16 11 x 6", "float32 11 x 6"),
        "count": ("int64 1", "int64 2"),
    }
    assert not found.same


def test_a_part_that_was_not_saved_is_no_difference_of_zeros(tmp_path: Path) -> None:
    full = {"param.w": torch.zeros(6, 2)}
    found = both(tmp_path, even_layout(full, 3)[:2], even_layout(full, 3))
    assert found.unlike == {"param.w": ("float32 6 x 2, 8 of 12 elements saved", "float32 6 x 2")}


def test_step_and_cursor_make_another_state_claim_and_time_do_not(tmp_path: Path) -> None:
    states = even_layout(some_tensors(1), 2)
    side = saved(tmp_path, states)

    def against(**update: object) -> Comparison:
        return compare(side, Saved(side.store, side.manifest.model_copy(update=update)))

    assert against(claim=9, created=1.0, versions={"torch": "3"}, metrics={"loss": 1.0}, config_digest="e").same
    for update in ({"step": 11}, {"cursor": 81}, {"seed": 2}, {"data_digest": "x"}, {"model": {"vocab_size": 3}}):
        assert not against(**update).same
    assert against(layout={"tp": 2}).metadata == {"layout.dp_shard": (2, None), "layout.tp": (None, 2)}


def test_bytes_that_are_damaged_are_not_compared(tmp_path: Path) -> None:
    for name in ("left", "right"):
        (tmp_path / name).mkdir()
    left = saved(tmp_path / "left", even_layout(some_tensors(1), 2))
    right = saved(tmp_path / "right", even_layout(some_tensors(1), 3))
    path = next(iter(right.manifest.objects))
    right.store.write(path, [bytes([right.store.read(path)[0] ^ 1]) + right.store.read(path)[1:]])
    with pytest.raises(DamagedChunk, match=path):
        compare(left, right)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int32", "uint8"])
def test_distances_of_each_dtype_are_those_of_torch(dtype: str) -> None:
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(1)
    a, b = ((torch.randn(1000, generator=generator) * 50).abs().to(kind) for _ in range(2))
    bits = [tensor.view(torch.uint8).numpy().view(f"u{tensor.element_size()}") for tensor in (a, b)]
    found = difference(*bits, dtype)
    apart = (a.double() - b.double()).abs()
    assert found.differing == int((a != b).sum())
    assert found.absolute == apart.max().item()
    assert found.relative == pytest.approx((apart / torch.maximum(a, b).double().clamp(min=1e-30)).max().item())


def test_values_that_are_no_numbers() -> None:
    def of(a: float, b: float) -> tuple[int, float | None, float | None]:
        bits = [np.array([value], np.float32).view(np.uint32) for value in (a, b)]
        found = difference(*bits, "float32")
        return found.differing, found.absolute, found.relative

    assert of(math.nan, math.nan) == (0, 0.0, 0.0)
    assert of(0.0, -0.0) == (1, 0.0, 0.0)
    assert of(1.0, math.inf)[:2] == (1, math.inf)
    count, absolute, relative = of(1.0, math.nan)
    assert (count, math.isnan(absolute or 0), math.isnan(relative or 0)) == (1, True, True)
    a, b = np.array([2**63 - 1], np.int64), np.array([-(2**63)], np.int64)
    assert difference(a.view(np.uint64), b.view(np.uint64), "int64").absolute == 2.0**64
    assert difference(a.view(np.uint64), (a - 1).view(np.uint64), "int64").absolute == 1.0
    assert difference(np.uint8([1]), np.uint8([2]), "float8_e4m3fn").absolute is None


def test_memory_is_bounded_by_cells_not_by_the_model(tmp_path: Path) -> None:
    full = {"param.w": torch.zeros(48, 2**18), "exp_avg.w": torch.zeros(2**18, 16)}
    for name in ("left", "right"):
        (tmp_path / name).mkdir()
    sides = [
        saved(tmp_path / "left", even_layout(full, 2)),
        saved(tmp_path / "right", even_layout({key: tensor + 1 for key, tensor in full.items()}, 3, dim=1)),
    ]
    tracemalloc.start()
    try:
        found = compare(*sides, cell_bytes=2**19)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert {each.differing for each in found.tensors.values()} == {48 * 2**18, 2**22}
    assert peak < 40 * 2**20 < sum(tensor.nbytes for tensor in full.values())


def test_without_torch() -> None:
    program = (
        "import elastic_train.checkpoint.compare, elastic_train.checkpoint.copying, sys; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
