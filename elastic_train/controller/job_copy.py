"""What a job folder needs, beside a checkpoint, so that its job can be trained on from there."""

from __future__ import annotations

import json
import time
from typing import Any

from elastic_train.controller.job_folder import RECORD, JobMismatch, read_record
from elastic_train.storage.errors import AlreadyExists, NotFound
from elastic_train.storage.store import Store

SOURCE_FILES = "hf/"


def adopt_job(source: Store, target: Store, name: str) -> bool:
    """Gives the job folder ``target`` the identity of the job in ``source``; whether it had none.

    A new folder gets the record (``job.json``) under ``name``, and what is kept of the Hugging Face folder that the
    weights came from. Its logs begin anew.

    Raises JobMismatch when ``source`` has no record of a job, or ``target`` that of another job.
    """
    record = _record(source)
    if record is None:
        raise JobMismatch(f"{source.uri} has no {RECORD}, so nobody knows which job its checkpoints are of")
    new = _record(target) is None
    if new:
        for entry in source.list(SOURCE_FILES):
            target.write(entry.path, [source.read(entry.path)])
        made = record | {"name": name, "created": time.time(), "copied_from": source.uri}
        made["config"] = record["config"] | {"name": name}
        try:
            target.create(RECORD, json.dumps(made, indent=1).encode())
        except AlreadyExists:
            new = False
    there = _record(target)
    if there is None or there["identity"] != record["identity"]:
        raise JobMismatch(f"{target.uri} is the folder of another job ({_changed(record, there)}); give another folder")
    return new


def _record(store: Store) -> dict[str, Any] | None:
    try:
        return read_record(store)
    except NotFound:
        return None


def _changed(record: dict[str, Any], there: dict[str, Any] | None) -> str:
    ours, theirs = record["identity"], there["identity"] if there else {}
    return ", ".join(key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)) + " differ"
