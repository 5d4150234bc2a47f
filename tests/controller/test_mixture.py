"""Whole jobs on mixtures of packed documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from elastic_train.config.job import Job
from elastic_train.data.samples import PADDING_LABEL
from elastic_train.data.sources import open_training
from tests.data.token_sets import make
from tests.jobs import make_job
from tests.local_job import LocalJob


def mixed_job(folder: Path) -> Job:
    """Documents of 5 to 60 tokens, two thirds of them from ``a``, from step 12 on a tenth."""
    for name, shards in (("a", 3), ("b", 2)):
        sizes = np.random.default_rng(shards).integers(5, 61, (shards, 60))
        ends = [np.cumsum(row).tolist() for row in sizes]
        make(str(folder / name), [row[-1] for row in ends], 256, ends=ends, vocabulary=300)
    sources = ", ".join(f"{{name: {name}, uri: '{folder / name}', weight: {3 - n}}}" for n, name in enumerate("ab", 1))
    return make_job(
        folder / "none",
        folder,
        "mixture",
        "data.uri=null",
        f"data.sources=[{sources}]",
        "data.phases=[{from_step: 12, weights: {a: 1, b: 9}}]",
        "data.packing=documents",
        "hosts.max=2",
        "parallel.pp=1",
        "training.steps=20",
    )


@pytest.mark.slow
def test_a_kill_changes_neither_the_samples_nor_what_counts_in_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job = mixed_job(tmp_path)
    with LocalJob(job) as run:
        run.start_hosts("ab")
        run.wait_step(8)
        run.kill_host("b1")
        assert run.finish()["state"] == "finished"
        lines = run.lines("steps")
    batches = open_training(job).batches
    assert [line["samples"] for line in lines] == [batches.sample_ids(step) for step in range(1, 21)]
    slots = [[batches.slot(step, slot) for slot in range(8)] for step in range(1, 21)]
    valid = [sum(int((slot.labels != PADDING_LABEL).sum()) for slot in step) for step in slots]
    assert [line["valid_tokens"] for line in lines] == valid
    assert len(set(valid)) > 1 and max(valid) <= 8 * 32
    first, last = ([line["samples"] for line in lines[part]] for part in (slice(0, 11), slice(11, 20)))
    size = len(open_training(job).datasets[0])
    of_a = [sum(i < size for samples in part for i in samples) / sum(map(len, part)) for part in (first, last)]
    assert of_a[0] > 0.5 and of_a[1] < 0.3
