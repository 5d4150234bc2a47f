"""What the tests of whole jobs in object storage ask of a job."""

from __future__ import annotations

from typing import Any

from elastic_train.checkpoint.catalog import list_checkpoints, load_manifest
from elastic_train.checkpoint.verify import verify_checkpoint
from elastic_train.config.job import Job
from elastic_train.controller.job_folder import job_store
from elastic_train.storage.json_lines import read_json_lines

Lines = list[dict[str, Any]]


def lines(job: Job, name: str) -> Lines:
    """A log of the job folder, such as ``steps``."""
    return read_json_lines(job_store(job), f"{name}.jsonl")


def whole_checkpoints(job: Job) -> list[int]:
    """Steps that are committed; each is read in full and every checksum compared."""
    store = job_store(job)
    steps = list_checkpoints(store)
    for step in steps:
        assert verify_checkpoint(store, load_manifest(store, step)) == []
    return steps
