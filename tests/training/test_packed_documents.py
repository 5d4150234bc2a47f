"""Samples that hold several documents, from the files of a data set to logits and losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.data.dataset import TokenDataset
from elastic_train.data.samples import Sample
from tests.data.token_sets import make
from tests.ranks import run_ranks
from tests.training.packed_runs import first_step, logits
from tests.training.synthetic import small_job

pytestmark = pytest.mark.slow
DOCUMENTS = [[9, 20, 32], [14, 31]]
"""Ends of documents in two shards: documents of 9, 11, 12, 14 and 17 tokens, so of 8, 10, 11, 13 and 16 places."""
LAYOUTS = [(Layout(), "gather"), (Layout(cp=2), "gather"), (Layout(cp=2), "ulysses")]


def job(folder: Path, context: str = "gather", batch: int = 1, **data: Any) -> Job:
    return small_job(
        model={"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 65536},
        data={"uri": str(folder), **data},
        training={"global_batch": batch},
        parallel={"context": context},
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make(str(tmp_path / "set"), [32, 31], 16, ends=DOCUMENTS)
    return tmp_path / "set"


def changed(sample: Sample, document: int) -> Sample:
    """The sample with other tokens in one document."""
    ids = np.where(sample.documents == document, (sample.input_ids + 7) % 65536, sample.input_ids)
    return sample._replace(input_ids=ids)


def logits_in_order(work: Job, layout: Layout, samples: list[Sample]) -> list[npt.NDArray[np.float32]]:
    """[places, vocabulary] of each sample."""
    ranks = run_ranks(logits, layout.world_size, work, layout, samples)
    places = np.argsort([place for held, _ in ranks for place in held])
    return [np.concatenate([found[index] for _, found in ranks])[places] for index in range(len(samples))]


@pytest.mark.parametrize(("layout", "context"), LAYOUTS, ids=str)
def test_no_document_sees_another(folder: Path, layout: Layout, context: str) -> None:
    """Bitwise the same logits, with other tokens in any of the documents before or after, or as padding."""
    dataset = TokenDataset.open(str(folder), 32, packing="documents", tails="keep")
    sample = dataset.sample(0)
    assert [length for _, length in dataset.pieces(0)] == [8, 10, 11]  # and three places of padding
    variants = [sample, *(changed(sample, document) for document in range(4))]
    whole, *others = logits_in_order(job(folder, context), layout, variants)
    for document, other in enumerate(others):
        same = sample.documents != document
        assert np.array_equal(other[same], whole[same])
        assert (other[~same] != whole[~same]).any(axis=1).all()


@pytest.mark.parametrize(("layout", "context"), LAYOUTS, ids=str)
def test_a_document_has_the_logits_it_has_alone(folder: Path, layout: Layout, context: str) -> None:
    """Positions start anew: the same to rounding, wherever in a sample it is."""
    packed = TokenDataset.open(str(folder), 32, packing="documents", tails="keep")
    alone = TokenDataset.open(str(folder), 32, packing="none", tails="keep")
    by_start = {alone.pieces(index)[0][0]: alone.sample(index) for index in range(len(alone))}
    assert len(by_start) == len(alone) == 5
    singles = [by_start[start] for start, _ in packed.pieces(0)]
    whole, *expected = logits_in_order(job(folder, context), layout, [packed.sample(0), *singles])
    place = 0
    for (_, length), single in zip(packed.pieces(0), expected, strict=True):
        np.testing.assert_allclose(whole[place : place + length], single[:length], rtol=2e-4, atol=2e-4)
        place += length


def test_packed_or_not_the_loss_is_the_same(folder: Path) -> None:
    """All five documents in one batch: two samples with packing, five without; padding counts in neither."""
    found = {}
    for packing in ("documents", "none"):
        samples = len(TokenDataset.open(str(folder), 32, packing=packing, tails="keep"))  # type: ignore[arg-type]
        (found[packing],) = run_ranks(first_step, 1, job(folder, batch=samples, packing=packing), Layout())
    assert found["documents"][1] == found["none"][1] == 8 + 10 + 11 + 13 + 16
    np.testing.assert_allclose(found["documents"], found["none"], rtol=1e-5)


def test_a_long_document_is_cut_and_each_place_counts_once(folder: Path) -> None:
    for packing, tails, places in (("documents", "keep", 58), ("none", "keep", 58), ("documents", "drop", 48)):
        dataset = TokenDataset.open(str(folder), 8, packing=packing, tails=tails)  # type: ignore[arg-type]
        work = job(folder, batch=len(dataset), packing=packing, tails=tails, sequence_length=8)
        ((loss, valid, _),) = run_ranks(first_step, 1, work, Layout())
        assert valid == places and loss > 0


def test_labels_that_do_not_count(tmp_path: Path) -> None:
    """Of a labelled data set the loss is over the tokens that count."""
    counts = (np.arange(63) % 2).astype(np.uint8)
    make(str(tmp_path), [32, 31], 16, ends=DOCUMENTS, counts=counts)
    ((_, valid, _),) = run_ranks(first_step, 1, job(tmp_path, batch=3, sequence_length=16), Layout())
    assert valid == counts[1:49].sum()
