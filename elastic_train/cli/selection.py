"""One way to name a checkpoint: ``JOB[@STEP]``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_train.cli.folder import open_folder
from elastic_train.cli.guard import UserError

if TYPE_CHECKING:
    from elastic_train.checkpoint.catalog import Catalog
    from elastic_train.checkpoint.manifest import CheckpointId, Manifest
    from elastic_train.storage.store import Store


@dataclass(frozen=True, slots=True)
class Selection:
    """A committed checkpoint of the job ``name``."""

    name: str
    catalog: Catalog
    id: CheckpointId

    @property
    def store(self) -> Store:
        return self.catalog.store

    def manifest(self) -> Manifest:
        """Raises CheckpointError when it cannot be read."""
        from elastic_train.checkpoint.manifest import read_manifest

        return read_manifest(self.store, self.id)


def split_reference(reference: str) -> tuple[str, int | None]:
    """(JOB, STEP) of ``JOB[@STEP]``."""
    job, at, step = reference.rpartition("@")
    is_step = bool(job) and step.isascii() and step.isdigit()
    if not at or "/" in step or (not is_step and Path(reference).exists()):
        return reference, None
    if not is_step:
        raise UserError(f"{reference!r}: @ is followed by a step, e.g. {job or 'JOB'}@1000; without it: the newest")
    return job, int(step)


def only_job(reference: str) -> str:
    """JOB, where a step makes no sense."""
    job, step = split_reference(reference)
    if step is not None:
        raise UserError(f"{reference!r}: this is about all checkpoints of a job; leave @{step} out")
    return job


def select(
    reference: str, storage: str | None = None, endpoint_url: str | None = None, region: str | None = None
) -> Selection:
    """The checkpoint that ``reference`` names. Raises UserError, CheckpointError with the steps that there are."""
    from elastic_train.checkpoint.catalog import read_catalog

    job, step = split_reference(reference)
    name, store = open_folder(job, storage, endpoint_url, region)
    catalog = read_catalog(store)
    if step is not None and catalog.committed:
        return Selection(name, catalog, catalog.find(step))
    if not catalog.committed:
        raise UserError(f"{store.uri} has no committed checkpoint")
    return Selection(name, catalog, catalog.committed[-1])
