from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from elastic_train.config.job import Job
from elastic_train.config.load import parse_job
from elastic_train.data.corpus import open_corpus
from elastic_train.data.dataset import TokenDataset
from elastic_train.data.errors import DataError
from elastic_train.data.evaluation import EvaluationBatches, open_evaluation, unfit_for_evaluation
from elastic_train.data.given import given_tokenizer
from elastic_train.data.manifest import Manifest, read_manifest
from elastic_train.data.prepare import prepare
from elastic_train.storage.store import Store
from tests.config.job_files import GOOD


@pytest.fixture
def data(text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``train``; ``held``: another text with the same tokenizer; ``other``: that text with its own tokenizer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "held.txt").write_text("model reads what comes next and grüßt the words of many\n" * 40)
    prepare(open_corpus(str(text_folder)), str(tmp_path / "train"), 300)
    held = open_corpus(str(tmp_path / "held.txt"))
    prepare(held, str(tmp_path / "held"), 257, given=given_tokenizer(Store.open(str(tmp_path / "train"))))
    prepare(held, str(tmp_path / "other"), 280)
    return tmp_path


def job(data: Path, name: str, *overrides: str) -> Job:
    given = [f"data.uri='{data}/train'", f"evaluation.uri='{data}/{name}'", "training.micro_batch=2"]
    return parse_job(GOOD, [*given, "model.vocab_size=300", "evaluation.samples=5", *overrides])


def opened(data: Path) -> Manifest:
    return TokenDataset.open(str(data / "train"), 32).manifest


def test_slots_are_the_first_samples_in_order_and_padding(data: Path) -> None:
    batches = open_evaluation(job(data, "held"), opened(data))
    assert batches is not None and batches.slots == 3
    held = TokenDataset.open(str(data / "held"), 32)
    for index in range(5):
        for rows, expected in zip(batches.slot(index // 2), held.sample(index), strict=True):
            np.testing.assert_array_equal(rows[index % 2], expected)
    ids, labels, _ = batches.slot(2)
    assert not ids[1].any() and (labels[1] == -100).all()
    with pytest.raises(ValueError, match="slot 3 is outside the 3 slots"):
        batches.slot(3)


def test_documents_and_packing_are_those_of_training(data: Path) -> None:
    packed = TokenDataset.open(str(data / "held"), 32, packing="documents", tails="keep")
    batches = open_evaluation(job(data, "held", "data.packing=documents"), opened(data))
    assert batches is not None
    np.testing.assert_array_equal(batches.slot(0).documents[0], packed.sample(0).documents)
    np.testing.assert_array_equal(batches.slot(0).labels[0], packed.sample(0).labels)


def test_a_data_set_prepared_with_anothers_tokenizer_has_its_tokens(data: Path) -> None:
    names = ("train", "held", "other")
    train, held, other = (read_manifest(Store.open(str(data / name)))[0] for name in names)
    assert held.tokenizer.sha256 == train.tokenizer.sha256
    files = [data / name / made.tokenizer.path for name, made in (("train", train), ("held", held))]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert other.tokenizer.sha256 != train.tokenizer.sha256 and other.inputs_sha256 != held.inputs_sha256
    again = prepare(
        open_corpus(str(data / "held.txt")),
        str(data / "held"),
        999,
        given=given_tokenizer(Store.open(str(data / "train"))),
    )
    assert again.reused


def test_no_evaluation(data: Path) -> None:
    without = parse_job(GOOD, [f"data.uri='{data}/train'"])
    assert open_evaluation(without, opened(data)) is None
    assert unfit_for_evaluation(without, opened(data)) == []


def test_fewer_samples_than_asked_for_are_an_error_with_both_numbers(data: Path) -> None:
    there = len(TokenDataset.open(str(data / "held"), 32))
    made = job(data, "held", f"evaluation.samples={there + 1}")
    sentence = f"{there} sequences are fewer than evaluation.samples={there + 1}"
    assert sentence in unfit_for_evaluation(made, opened(data))[0]
    with pytest.raises(DataError, match=sentence):
        open_evaluation(made, opened(data))
    with pytest.raises(DataError, match=sentence):
        EvaluationBatches(TokenDataset.open(str(data / "held"), 32), samples=there + 1, micro_batch=1)
    assert unfit_for_evaluation(job(data, "held", f"evaluation.samples={there}"), opened(data)) == []


def test_another_tokenizer_is_refused(data: Path) -> None:
    (problem,) = unfit_for_evaluation(job(data, "other"), opened(data))
    assert "its tokenizer (280 entries) is another one than that of data.uri=" in problem
    assert "(300 entries); prepare it with --tokenizer" in problem


def test_a_data_set_that_is_not_there(data: Path) -> None:
    with pytest.raises(DataError, match=r"absent has no manifest\.json"):
        unfit_for_evaluation(job(data, "absent"), opened(data))
