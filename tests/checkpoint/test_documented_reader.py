"""The reader that docs/checkpoints.md shows, on real checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic_train.checkpoint.catalog import read_catalog
from elastic_train.checkpoint.claims import take_claim
from elastic_train.storage.store import Store
from tests.checkpoint.states import even_layout, save_and_commit, some_tensors

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


@pytest.fixture
def reader() -> dict[str, Any]:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    return names


def test_it_loads_what_was_saved(reader: dict[str, Any], tmp_path: Path) -> None:
    full = {key: tensor for key, tensor in some_tensors(1).items() if tensor.dtype != torch.bfloat16}
    full["param.large"] = torch.randn(3, 2**18 + 5)
    save_and_commit(Store.open(str(tmp_path / "job")), tmp_path, even_layout(full, 3), 10)
    manifest = reader["newest"](tmp_path / "job")
    assert manifest["tensors"].keys() == full.keys()
    for key, tensor in full.items():
        assert np.array_equal(reader["load"](tmp_path / "job", manifest, key), tensor.numpy())
    chunk = manifest["tensors"]["param.large"]["chunks"][0]
    file = tmp_path / "job" / chunk["object"]
    content = bytearray(file.read_bytes())
    content[chunk["byte_offset"] + 7] ^= 1
    file.write_bytes(content)
    with pytest.raises(AssertionError, match=r"block 0 of param\.large"):
        reader["load"](tmp_path / "job", manifest, "param.large")


def test_it_takes_the_one_that_we_take(reader: dict[str, Any], tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "job"))
    for step in (9, 10, 30):
        save_and_commit(store, tmp_path, even_layout(some_tensors(1), 1), step)
    assert reader["newest"](tmp_path / "job")["step"] == 30
    take_claim(store, 10, "did not know of 30", 1.7e9)
    assert reader["newest"](tmp_path / "job")["step"] == read_catalog(store).committed[-1].step == 10
