"""A manifest or a claim that was spoilt on the way is read again before it counts as damaged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elastic_train.checkpoint.catalog import read_catalog
from elastic_train.checkpoint.claims import newest_claim
from elastic_train.checkpoint.errors import CheckpointError
from elastic_train.checkpoint.manifest import read_manifest
from elastic_train.checkpoint.sealed import REREADS
from elastic_train.checkpoint.survey import survey
from elastic_train.storage.local import LocalStore
from elastic_train.storage.store import Store
from tests.checkpoint.states import even_layout, save_and_commit


class Spoiling(LocalStore):
    """Spoils so many reads, then none."""

    def __init__(self, root: Path, times: int) -> None:
        super().__init__(root)
        self.times = times

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        data = super().read(path, offset, length)
        self.times -= 1
        return data if self.times < 0 else data.replace(b"{", b"[", 1)


def test_manifest(tmp_path: Path) -> None:
    manifest = save_and_commit(Store.open(str(tmp_path)), tmp_path, even_layout({"a": torch.arange(6.0)}, 2), step=5)
    assert read_manifest(Spoiling(tmp_path, REREADS), manifest.id) == manifest
    with pytest.raises(CheckpointError, match="not a whole manifest"):
        read_manifest(Spoiling(tmp_path, REREADS + 1), manifest.id)


def test_claim(tmp_path: Path) -> None:
    save_and_commit(Store.open(str(tmp_path)), tmp_path, even_layout({"a": torch.arange(6.0)}, 2), step=5)
    claim = newest_claim(Store.open(str(tmp_path)))
    assert claim is not None
    assert newest_claim(Spoiling(tmp_path, REREADS)) == claim
    with pytest.raises(CheckpointError, match="is damaged: not a whole claim"):
        newest_claim(Spoiling(tmp_path, REREADS + 1))


def test_survey(tmp_path: Path) -> None:
    """What is spoilt on the way is not shown as unreadable."""
    save_and_commit(Store.open(str(tmp_path)), tmp_path, even_layout({"a": torch.arange(6.0)}, 2), step=5)
    catalog = read_catalog(Store.open(str(tmp_path)))

    def status(times: int) -> list[str]:
        return [found.status for found in survey(replace(catalog, store=Spoiling(tmp_path, times)))]

    assert status(REREADS) == ["committed"]
    assert status(REREADS + 1) == ["unreadable"]
