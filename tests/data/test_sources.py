from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from elastic_train.config.job import Job
from elastic_train.config.load import parse_job
from elastic_train.data.dataset import TokenDataset
from elastic_train.data.errors import DataError
from elastic_train.data.manifest import parse_manifest
from elastic_train.data.mixture import PERIOD, shares
from elastic_train.data.order import SampleOrder
from elastic_train.data.sources import data_problems, open_training
from tests.config.job_files import GOOD
from tests.data.token_sets import make

SAMPLES = {"a": 100, "b": 40, "c": 300}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Data sets of 8 tokens a sample."""
    for name, samples in SAMPLES.items():
        make(str(tmp_path / name), [samples * 8 // 2, samples * 8 // 2 + 3], 16)
    return tmp_path


def job(folder: Path, *overrides: str, weights: str = "a 2 repeat, b 1 repeat, c 1 repeat") -> Job:
    sources = ", ".join(
        f"{{name: {name}, uri: '{folder / name}', weight: {weight}, exhausted: {exhausted}}}"
        for name, weight, exhausted in (source.split() for source in weights.split(", "))
    )
    settings = ["data.uri=null", f"data.sources=[{sources}]", "data.sequence_length=8", "model.vocab_size=65536"]
    return parse_job(GOOD, [*settings, *overrides])


def test_one_data_set_has_the_samples_it_always_had(folder: Path) -> None:
    made = parse_job(GOOD, [f"data.uri='{folder / 'a'}'", "data.sequence_length=8", "model.vocab_size=65536"])
    data, dataset = open_training(made), TokenDataset.open(str(folder / "a"), 8)
    order = SampleOrder(100, made.seed)
    assert data.digest == dataset.digest
    for step in (1, 7, 20):
        expected = [order.sample_id(n) for n in range((step - 1) * 8, step * 8)]
        assert data.batches.sample_ids(step) == expected
        rows = [data.batches.slot(step, slot).input_ids[0].tolist() for slot in range(8)]
        assert rows == [dataset.sample(i).input_ids.tolist() for i in expected]


def test_whoever_opens_packed_sources_hears_of_each_shard(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    told: list[int] = []
    open_training(job(folder, "data.packing=documents"), lambda: told.append(1))
    assert len(told) == 6
    assert len([*(folder / "cache").rglob("*-pack")]) == 6


def test_a_mixture_takes_each_sources_samples_by_weight(folder: Path) -> None:
    made = job(folder, "data.phases=[{from_step: 129, weights: {a: 0, b: 1, c: 3}}]")
    data = open_training(made)
    datasets = {name: TokenDataset.open(str(folder / name), 8) for name in SAMPLES}
    firsts = {"a": 0, "b": 100, "c": 140}
    table: Counter[str] = Counter()
    for step in (*range(1, 129), 129, 200):
        for place, sample in enumerate(data.batches.sample_ids(step)):
            name = max((name for name in firsts if firsts[name] <= sample), key=firsts.__getitem__)
            table[name] += step <= 128
            assert step < 129 or name != "a"
            if step in (1, 128, 200):
                expected = datasets[name].sample(sample - firsts[name])
                assert data.batches.slot(step, place).input_ids[0].tolist() == expected.input_ids.tolist()
    assert PERIOD == 128 * 8 and [table[name] for name in "abc"] == shares([2, 1, 1])


def test_an_epoch_of_a_source_has_all_its_samples(folder: Path) -> None:
    data = open_training(job(folder))
    ids = [i for step in range(1, 200) for i in data.batches.sample_ids(step)]
    of_b = [i for i in ids if 100 <= i < 140]
    epochs = [of_b[start : start + 40] for start in range(0, len(of_b) - 40, 40)]
    assert all(sorted(epoch) == list(range(100, 140)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_the_digest_covers_every_source(folder: Path) -> None:
    first = open_training(job(folder)).digest
    assert open_training(job(folder, "seed=2")).digest == first
    assert open_training(job(folder, weights="b 1 repeat, a 2 repeat, c 1 repeat")).digest != first
    make(str(folder / "c"), [3000], 16)
    assert open_training(job(folder)).digest != first


def test_a_source_that_is_to_stop_names_its_last_step(folder: Path) -> None:
    """b has 40 samples and a quarter of the places: its end is in a step that is found by counting."""
    weights = "a 2 repeat, b 1 stop, c 1 repeat"
    ids = [open_training(job(folder)).batches.sample_ids(step) for step in range(1, 40)]
    used = [sum(100 <= i < 140 for step in ids[: step + 1] for i in step) for step in range(len(ids))]
    # The 41st sample would be one of b's second epoch: ids tell nothing of epochs, so count what was used.
    last = next(step for step, count in enumerate(used, start=1) if count > 40)
    (problem,) = data_problems(job(folder, weights=weights))
    assert problem == (
        f"source b ({folder / 'b'}): exhausted=stop, and its 40 samples end in step {last} of training.steps=100; "
        "use fewer steps, a smaller weight, more text, or repeat"
    )
    with pytest.raises(DataError, match=f"its 40 samples end in step {last} of"):
        open_training(job(folder, weights=weights))
    assert data_problems(job(folder, f"training.steps={last - 1}", weights=weights)) == []


def test_one_data_set_may_be_used_for_one_epoch_at_most(folder: Path) -> None:
    given = [f"data.uri='{folder / 'a'}'", "data.sequence_length=8", "model.vocab_size=65536", "data.exhausted=stop"]
    assert data_problems(parse_job(GOOD, [*given, "training.steps=12"])) == []
    (problem,) = data_problems(parse_job(GOOD, [*given, "training.steps=13"]))
    assert problem.startswith(f"data.uri={folder / 'a'}: exhausted=stop, and its 100 samples end in step 13 of ")


def test_sources_that_do_not_fit_are_named_together(folder: Path) -> None:
    make(str(folder / "tiny"), [5], 16)
    file = folder / "c" / "manifest.json"
    manifest = parse_manifest(file.read_bytes(), "c")
    other = manifest.tokenizer.model_copy(update={"sha256": "1" * 64})
    file.write_bytes(manifest.model_copy(update={"tokenizer": other}).to_bytes())
    weights = "a 1 repeat, c 1 repeat, tiny 1 repeat"
    problems = data_problems(job(folder, "model.vocab_size=60000", weights=weights))
    assert [problem.partition(":")[0] for problem in problems] == [
        "model.vocab_size=60000",
        "model.vocab_size=60000",
        f"source c ({folder / 'c'})",
        "model.vocab_size=60000",
        f"source tiny ({folder / 'tiny'})",
    ]
    assert "its tokenizer (65536 entries) is another one than that of source a" in problems[2]
    assert "gives no sequence of 8 tokens" in problems[4]


def test_a_weight_that_is_less_than_a_place(folder: Path) -> None:
    (problem,) = data_problems(job(folder, weights="a 1 repeat, b 0.0001 repeat"))
    assert problem == (
        "data.sources: weight 0.0001 of 1.0001 is less than one of 1024 places; use a larger weight, or leave the "
        "source out"
    )


def test_fewer_samples_than_a_batch(folder: Path) -> None:  # DA-05
    (problem,) = data_problems(job(folder, "training.global_batch=500", weights="a 1 repeat, b 1 repeat"))
    assert problem.startswith("data.sources: 140 sequences of 8 tokens are fewer than training.global_batch=500; ")


def test_packing_of_one_document_has_nothing_to_mask(folder: Path) -> None:
    make(str(folder / "one"), [500], 16)
    given = [f"data.uri='{folder / 'one'}'", "data.sequence_length=8", "model.vocab_size=65536"]
    for setting in ("data.document_mask=true", "data.packing=documents"):
        (problem,) = data_problems(parse_job(GOOD, [*given, setting]))
        assert problem.startswith(f"{setting}: data.uri={folder / 'one'} holds 1 document: there is nothing to mask")
