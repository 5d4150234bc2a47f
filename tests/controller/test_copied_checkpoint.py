"""A job goes on from a checkpoint that was copied into a new folder, as if it had never been elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.checkpoint.catalog import list_checkpoints, load_manifest
from elastic_train.checkpoint.copying import copy_checkpoint
from elastic_train.config.job import Job
from elastic_train.controller.job_copy import adopt_job
from elastic_train.controller.job_folder import JobFolder, JobMismatch, job_store
from elastic_train.controller.resumption import open_data
from elastic_train.storage.store import Store
from tests.jobs import assert_same_curve, make_job
from tests.local_job import LocalJob


def run(job: Job) -> LocalJob:
    with LocalJob(job, run_id=job.name) as run:
        run.start_host("a", "node-a")
        assert run.finish()["state"] == "finished"
    return run


@pytest.mark.slow
def test_a_job_goes_on_from_a_copy_in_a_new_folder(corpus: Path, tmp_path: Path) -> None:
    settings = ("training.steps=6", "checkpoint.every_steps=3", "hosts.max=1")
    job = make_job(corpus, tmp_path / "runs", "first", *settings)
    reference = run(job).lines("steps")
    source = job_store(job)
    branch = make_job(corpus, tmp_path / "other runs", "branch", *settings)
    target = job_store(branch)
    assert adopt_job(source, target, "branch")
    copy_checkpoint(source, load_manifest(source, 3), target)
    gone_on = run(branch)
    assert_same_curve(gone_on.lines("steps"), reference[3:], tolerance=0.0)
    assert list_checkpoints(target) == [3, 6]


def test_the_new_folder_is_of_that_job_and_of_no_other(corpus: Path, tmp_path: Path) -> None:
    job = make_job(corpus, tmp_path / "runs", "first")
    digest = open_data(job).digest
    JobFolder(job).open(digest)
    source = job_store(job)
    source.write("hf/source.json", [b"{}"])
    branch = make_job(corpus, tmp_path / "runs", "branch")
    assert adopt_job(source, job_store(branch), "branch")
    assert not adopt_job(source, job_store(branch), "branch")
    assert job_store(branch).read("hf/source.json") == b"{}"
    assert JobFolder(branch).open(digest)["copied_from"] == source.uri
    with pytest.raises(JobMismatch, match="with other settings: seed=2"):
        JobFolder(make_job(corpus, tmp_path / "runs", "branch", "seed=2")).open(digest)
    other = make_job(corpus, tmp_path / "runs", "other", "seed=2")
    JobFolder(other).open(digest)
    with pytest.raises(JobMismatch, match=r"is the folder of another job \(seed differ\)"):
        adopt_job(source, job_store(other), "other")
    with pytest.raises(JobMismatch, match=r"has no job\.json"):
        adopt_job(Store.open(str(tmp_path / "nothing")), job_store(branch), "branch")
