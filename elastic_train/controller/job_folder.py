"""The job folder: identity, journal of decisions, ledger of events, one line per finished step. All in job storage."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from elastic_train import __version__
from elastic_train.config.job import Job
from elastic_train.storage.errors import AlreadyExists, StorageError
from elastic_train.storage.formats import require_known
from elastic_train.storage.json_lines import FORMAT_VERSION as LINES_VERSION
from elastic_train.storage.json_lines import JsonLines, read_json_lines
from elastic_train.storage.store import Store, join

FORMAT_VERSION = 1
"""Of ``job.json``."""
_ENDS = ("generation_formed", "generation_adopted", "job_finished")
"""Events that end a recovery, or the job."""
RECORD = "job.json"


class JobMismatch(Exception):
    """A job of this name exists and is another job; one sentence says in what."""


class RolledBack(NamedTuple):
    """What is left of ``steps.jsonl``."""

    dropped: int
    """how many lines are gone"""
    line: dict[str, Any]
    """of the step that was gone back to; {} when it has none"""


def job_uri(job: Job) -> str:
    """Of the job's folder, ``<storage.uri>/<name>``."""
    return join(job.storage.uri, job.name)


def job_store(job: Job) -> Store:
    """The store of the job's folder."""
    return Store.open(job_uri(job), job.storage)


def identity(job: Job, data_digest: str) -> dict[str, Any]:
    """What must not change between two submissions of one name.

    It decides the weights, the order of the samples, and which tensors a checkpoint has.
    """
    return {
        "model": job.model.model_dump(mode="json"),
        "seed": job.seed,
        "init_from": job.init_from,
        "data_digest": data_digest,
        "sequence_length": job.data.sequence_length,
        "packing": job.data.packing,
        "tails": job.data.tail_policy,
        "document_mask": job.data.separates_documents,
        "mixture": _mixture(job),
        "global_batch": job.training.global_batch,
        "micro_batch": job.training.micro_batch,
        "precision": job.training.precision,
        "optimizer": job.optimizer.name,
        "averaged_weights": job.training.ema_decay is not None,
        "lora": None if job.lora is None else job.lora.model_dump(mode="json"),
    }


DEFAULTS = {"packing": "stream", "tails": "drop", "mixture": None, "lora": None}
"""What jobs have that were begun before there was a choice."""


def _recorded(record: dict[str, Any]) -> dict[str, Any]:
    """The identity in a record, with what an older version did not write there."""
    identity: dict[str, Any] = record["identity"]
    try:
        data = record["config"]["data"]
        mask = bool(data.get("document_mask")) or data.get("packing") == "documents"
    except (KeyError, TypeError, AttributeError):  # no record of ours: the identity decides, which has to be complete
        mask = False
    return DEFAULTS | {"document_mask": mask} | identity


def _mixture(job: Job) -> dict[str, Any] | None:
    """Which sample comes from which source; None for one data set. ``data_digest`` says what the sources hold."""
    if not job.data.sources:
        return None
    weights = {source.name: source.weight for source in job.data.sources}
    return {"weights": weights, "phases": [phase.model_dump(mode="json") for phase in job.data.phases]}


def _flat(identity: dict[str, Any]) -> dict[str, Any]:
    """The fields of the model beside the others, so that a message names the one that differs."""
    return {f"model.{key}": value for key, value in identity["model"].items()} | {
        key: value for key, value in identity.items() if key != "model"
    }


def config_digest(job: Job) -> str:
    """sha256 of the whole job file in canonical JSON."""
    return hashlib.sha256(json.dumps(job.as_dict(), sort_keys=True).encode()).hexdigest()


def read_record(store: Store) -> dict[str, Any]:
    """The content of ``job.json`` in the job folder ``store``, which has at least ``identity`` and ``config``.

    Raises NotFound, FutureFormat when a later release has written it, and JobMismatch when it is no record of a job.
    """
    data, uri = store.read(RECORD), join(store.uri, RECORD)
    try:
        record = dict(json.loads(data))
        require_known(uri, record["format_version"], FORMAT_VERSION)
        if isinstance(record["identity"]["model"], dict) and isinstance(record["config"], dict):
            return record
    except (ValueError, TypeError, KeyError):
        pass
    raise JobMismatch(f"{uri} is not the record of a job")


class JobFolder:
    """The coordinator's hand on the job folder. Its lines are appended without waiting for a slow store."""

    def __init__(self, job: Job) -> None:
        self.store = job_store(job)
        self._job = job
        self.journal = JsonLines(self.store, "journal.jsonl", format_version=LINES_VERSION)
        self.ledger = JsonLines(self.store, "ledger.jsonl", format_version=LINES_VERSION)
        self.steps = JsonLines(self.store, "steps.jsonl", format_version=LINES_VERSION)

    def open(self, data_digest: str) -> dict[str, Any]:
        """Create ``job.json``, or check that the one there is of the same job; returns its content.

        ``data_digest`` is of the manifests of the job's data: a corpus prepared anew is another order of samples.

        Raises:
            JobMismatch: the name belongs to a job with another model, data order or batch, or its record is not one.
            FutureFormat: the record was written by a later release.
            StorageError: the folder cannot be read or written.
        """
        record = {
            "format_version": FORMAT_VERSION,
            "name": self._job.name,
            "created": time.time(),
            "version": __version__,
        }
        record |= {"identity": identity(self._job, data_digest), "config": self._job.as_dict()}
        try:
            self.store.create(RECORD, json.dumps(record, indent=1).encode())
        except AlreadyExists:
            try:
                record = read_record(self.store)
            except JobMismatch as error:
                raise JobMismatch(f"{error}; give the new job another name") from None
            self._check(record, data_digest)
        return record

    def _check(self, record: dict[str, Any], data_digest: str) -> None:
        ours, theirs = _flat(identity(self._job, data_digest)), _flat(_recorded(record))
        changed = [f"{key}={ours[key]!r} (there: {theirs.get(key)!r})" for key in ours if ours[key] != theirs.get(key)]
        if changed:
            raise JobMismatch(
                f"job {self._job.name!r} exists in {self.store.uri} with other settings: {'; '.join(changed)}; "
                "give the new job another name"
            )

    def last_generation(self) -> int:
        """The highest generation number ever used by this job, 0 for a new job."""
        return max((line.get("generation", 0) for line in read_json_lines(self.store, "journal.jsonl")), default=0)

    def decisions(self) -> list[dict[str, Any]]:
        """The journal so far."""
        return read_json_lines(self.store, "journal.jsonl")

    def last_account(self) -> dict[str, Any] | None:
        """The ledger's last account of the hosts' time; None when there is none since the last run began."""
        lines = read_json_lines(self.store, "ledger.jsonl")
        told = (line for line in reversed(lines) if line["event"] in ("time_account", "job_started"))
        last = next(told, None)
        return last if last is not None and last["event"] == "time_account" else None

    def last_host(self) -> int:
        """The largest number that a host has been given."""
        lines = read_json_lines(self.store, "ledger.jsonl")
        return max((line["host"] for line in lines if line["event"] == "host_joined"), default=0)

    def mlflow_run_id(self) -> str | None:
        """The MLflow run of the earlier submissions."""
        lines = read_json_lines(self.store, "journal.jsonl")
        return next((line["mlflow_run_id"] for line in reversed(lines) if "mlflow_run_id" in line), None)

    def roll_back(self, step: int) -> RolledBack:
        """Drop the lines of steps after ``step``. They will be computed again, to the same values.

        Does not wait for object storage. Raises StorageError when a file cannot be written.
        """
        found: dict[str, Any] = {}

        def keep(line: dict[str, Any]) -> bool:
            nonlocal found
            if line["step"] == step:
                found = line
            return bool(line["step"] <= step)

        dropped = self.steps.cut(keep)
        return RolledBack(dropped, found)

    def finished_steps(self) -> list[dict[str, Any]]:
        """All lines of ``steps.jsonl`` that are in storage."""
        return read_json_lines(self.store, "steps.jsonl")

    def decide(self, **decision: Any) -> None:
        """Journal a decision before it takes effect."""
        self.journal.append({"time": time.time(), **decision})

    def record(self, event: str, **fields: Any) -> dict[str, Any]:
        """Write an event to the ledger and return its line.

        The last one of a recovery, or of the job, makes storage take its story: a coordinator that dies soon would take
        it along.
        """
        line = {"time": time.time(), "event": event, **fields}
        self.ledger.append(line, soon=event in _ENDS)
        return line

    def flush_history(self) -> None:
        """Steps and decisions; raises StorageError when one of these logs could not be written."""
        self._for_each_log(JsonLines.flush, self.steps, self.journal)

    def flush(self) -> None:
        """Raises StorageError, after all logs have had their turn, when one could not be written."""
        self._for_each_log(JsonLines.flush, self.journal, self.ledger, self.steps)

    def abandon(self) -> None:
        """Another submission writes these logs from now on."""
        for lines in (self.journal, self.ledger, self.steps):
            lines.abandon()

    def close(self) -> None:
        """As ``flush``; nothing can be written afterwards."""
        self._for_each_log(JsonLines.close, self.journal, self.ledger, self.steps)

    def _for_each_log(self, act: Callable[[JsonLines], None], *logs: JsonLines) -> None:
        errors = []
        for lines in logs:
            try:
                act(lines)
            except StorageError as error:
                errors.append(error)
        if errors:
            raise errors[0]
