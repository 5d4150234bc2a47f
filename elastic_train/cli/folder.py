"""Job folders as the command line sees them: where one is, and what its logs say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_train.cli.guard import UserError

if TYPE_CHECKING:
    from elastic_train.storage.store import Store

EVENTS_SHOWN = 6


def job_name(job: str) -> str:
    """The name that a job's name or job file stands for."""
    if not _is_file(job):
        return job
    from elastic_train.config.load import load_job

    return load_job(job).name


def _is_file(job: str) -> bool:
    return job.endswith((".yaml", ".yml"))


def open_folder(job: str, storage: str, endpoint_url: str | None) -> tuple[str, Store]:
    """(job name, its folder) from a job's name and storage options, or from its job file."""
    from elastic_train.storage.store import Store

    if _is_file(job):
        from elastic_train.config.load import load_job

        loaded = load_job(job)
        return loaded.name, Store.open(loaded.storage.uri, loaded.storage).sub(loaded.name)
    config = None
    if storage.startswith("s3://"):
        from elastic_train.config.operation import StorageConfig

        config = StorageConfig(uri=storage, endpoint_url=endpoint_url)
    elif not (Path(storage.removeprefix("file://")) / job).is_dir():
        raise UserError(
            f"no job folder {storage.rstrip('/')}/{job}; give --storage, or the job file instead of the name"
        )
    return job, Store.open(storage, config).sub(job)


def describe_folder(name: str, store: Store) -> Iterator[str]:
    """Lines about a job that is not running, from the tails of its logs."""
    from elastic_train.cli.live import event_line
    from elastic_train.storage.json_lines import read_json_lines

    steps, events = read_json_lines(store, "steps.jsonl"), read_json_lines(store, "ledger.jsonl")
    if not steps and not events:
        raise UserError(f"{store.uri} holds no steps.jsonl and no ledger.jsonl; is {name} the name of a job?")
    yield f"{name}: not running; {_last_step(steps)}"
    for event in events[-EVENTS_SHOWN:]:
        yield f"  {event_line(event)}"


def _last_step(steps: list[dict[str, Any]]) -> str:
    if not steps:
        return "no finished step"
    last = steps[-1]
    return f"last finished step {last['step']}, loss {last['loss']}, generation {last.get('generation')}"
