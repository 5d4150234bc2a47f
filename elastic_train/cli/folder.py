"""Job folders as the command line sees them: where one is, and what its logs say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_train.cli.guard import UserError

if TYPE_CHECKING:
    from elastic_train.config.operation import StorageConfig
    from elastic_train.storage.store import Store

EVENTS_SHOWN = 6
DEFAULT_STORAGE = "runs"
PARTS = ("checkpoints/", "steps.jsonl", "ledger.jsonl")
"""What makes a folder without its record still the folder of a job."""
FIRST_ANSWER_SECONDS = 5.0
"""A store that does not answer for this long at the first request is reported; later ones have the whole budget."""


def job_name(job: str) -> str:
    """The name that a job's name, job file or folder stands for."""
    if is_job_file(job):
        from elastic_train.config.load import load_job

        return load_job(job).name
    return job.rstrip("/").rpartition("/")[2] if is_uri(job) else job


def is_job_file(job: str) -> bool:
    return job.endswith((".yaml", ".yml"))


def is_uri(job: str) -> bool:
    """Whether ``job`` is the folder itself: a path or URI. A name has no slash."""
    return "/" in job or job in (".", "..")


def open_folder(
    job: str, storage: str | None = None, endpoint_url: str | None = None, region: str | None = None
) -> tuple[str, Store]:
    """(name, store) of the folder of a job, which must be there.

    ``job`` is a job file, the URI of the folder, or a name: then the folder is below ``storage``.
    """
    name, store, reached = locate_folder(job, storage, endpoint_url, region)
    if not reached.exists("job.json") and not any(store.list(prefix) for prefix in PARTS):
        raise UserError(f"no job folder {_shown(job, storage, store)}{_others(job, store)}")
    return name, store


def locate_folder(
    job: str, storage: str | None = None, endpoint_url: str | None = None, region: str | None = None
) -> tuple[str, Store, Store]:
    """(name, store, the same store with little patience), whether there is anything or not."""
    from elastic_train.config.operation import StorageConfig
    from elastic_train.storage.store import Store

    config = StorageConfig()
    if is_job_file(job):
        from elastic_train.config.load import load_job

        loaded = load_job(job)
        uri, below, config = loaded.storage.uri, loaded.name, loaded.storage
    elif is_uri(job):
        uri, below = job, ""
    else:
        uri, below = storage or DEFAULT_STORAGE, job
    if storage is not None and not (below and not is_job_file(job)):
        raise UserError(f"--storage={storage} is for a job given by name; {job} says itself where its folder is")
    config = with_options(config, endpoint_url, region)
    brief = config.model_copy(update={"retry_seconds": min(config.retry_seconds, FIRST_ANSWER_SECONDS)})

    def opened(settings: StorageConfig) -> Store:
        store = Store.open(uri, settings)
        return store.sub(below) if below else store

    store = opened(config)
    return below or store.uri.rstrip("/").rpartition("/")[2], store, opened(brief)


def with_options(config: StorageConfig, endpoint_url: str | None, region: str | None) -> StorageConfig:
    """``config`` with what was given on the command line."""
    given = {"endpoint_url": endpoint_url, "region": region}
    return config.model_copy(update={key: value for key, value in given.items() if value is not None})


def _shown(job: str, storage: str | None, store: Store) -> str:
    """The folder as the user has named it."""
    if is_uri(job) or is_job_file(job):
        return store.uri
    return f"{(storage or DEFAULT_STORAGE).rstrip('/')}/{job}"


def _others(job: str, store: Store) -> str:
    """What to do about a folder that is not there."""
    file = store.local_path("job.json")
    beside = file.parent.parent if file is not None else Path("/nowhere")
    names = sorted(entry.parent.name for entry in beside.glob("*/job.json")) if beside.is_dir() else []
    there = f"; job folders there: {', '.join(names)}" if names else ""
    hint = "" if is_uri(job) or is_job_file(job) else "; give --storage, the job file, or the URI of the folder itself"
    return hint + there


def describe_folder(name: str, store: Store) -> Iterator[str]:
    """Lines about a job that is not running, from the tails of its logs."""
    from elastic_train.cli.live import event_line, time_line
    from elastic_train.controller.time_account import account_of_runs
    from elastic_train.storage.json_lines import read_json_lines

    steps, events = read_json_lines(store, "steps.jsonl"), read_json_lines(store, "ledger.jsonl")
    if not steps and not events:
        raise UserError(f"{store.uri} holds no steps.jsonl and no ledger.jsonl; is {name} the name of a job?")
    yield f"{name}: not running; {_last_step(steps)}"
    if (account := account_of_runs(events)) is not None:
        yield f"  {time_line(account)}, in all runs"
    events = [event for event in events if event.get("event") != "time_account"]
    for event in events[-EVENTS_SHOWN:]:
        yield f"  {event_line(event)}"


def _last_step(steps: list[dict[str, Any]]) -> str:
    if not steps:
        return "no finished step"
    last = steps[-1]
    return f"last finished step {last['step']}, loss {last['loss']}, generation {last.get('generation')}"
