"""Checkpoints of a simulated job: their size and the storage's speed, as given or as assumed."""

from __future__ import annotations

from elastic_train.cli.guard import UserError
from elastic_train.cli.simulate_asked import STEP, Asked, option
from elastic_train.cli.tables import size
from elastic_train.config.job import Job
from elastic_train.config.sizes import parse_size
from elastic_train.planner.simulation.costs import Saves
from elastic_train.planner.simulation.storage import (
    BYTES_PER_HOST,
    READ_PER_HOST,
    WRITE_PER_HOST,
    Storage,
    checkpoint_bytes,
)

_EVERY = {"elastic": 600.0, "restart": 300.0}
_STALL = {"elastic": 0.0, "restart": 5.0}
"""Assumed, seconds; 300 s is near Young's interval for Llama 3's failures. Elastic's stall is measured: 0.02 ms."""


def storage_of(asked: Asked, job: Job | None) -> Storage:
    """Raises UserError for a size or a rate that is none."""
    hosts = (asked.nodes or 1) * (asked.gpus_per_node or 1)
    if asked.checkpoint_size is not None:
        nbytes = float(_size(asked, "checkpoint_size", ""))
    else:
        nbytes = float(checkpoint_bytes(job)) if job is not None else BYTES_PER_HOST * hosts
    write = float(_size(asked, "storage_write", "/s")) if asked.storage_write else WRITE_PER_HOST * hosts
    read = float(_size(asked, "storage_read", "/s")) if asked.storage_read else READ_PER_HOST * hosts
    return Storage(nbytes, write, read)


def _size(asked: Asked, name: str, per: str) -> int:
    text = getattr(asked, name)
    try:
        found = parse_size(text.removesuffix(per)) if text.endswith(per) else 0
    except ValueError:
        found = 0
    if not found:
        example = "2TB/s or 500MB/s" if per else "840GB or 1.5TiB"
        raise UserError(f"{option(name)}={text}: must be {'a rate' if per else 'a size'} above 0 such as {example}")
    return found


def saves_of(asked: Asked, job: Job | None, storage: Storage, recovery: str) -> Saves:
    """Raises UserError for intervals that are shorter than a save."""
    stall = _STALL[recovery] if asked.checkpoint_stall is None else asked.checkpoint_stall
    takes = asked.checkpoint_takes or max(storage.save_seconds, stall)
    every = asked.checkpoint_every
    if every is not None and every < takes:
        least = f"--checkpoint-takes={takes:g}s" if asked.checkpoint_takes else f"the {takes:.4g} s that a save takes"
        raise UserError(f"--checkpoint-every={every:g}s: must be at least {least}")
    if every is None and job is not None:
        every = job.checkpoint.every_steps * (asked.step or STEP)
        if asked.checkpoint_takes and takes > every:
            raise UserError(f"--checkpoint-takes={takes:g}s: {asked.job} saves every {every:g}s; give at most that")
    return Saves(max(every or _EVERY[recovery], takes), min(stall, takes), takes)


def storage_lines(asked: Asked, job: Job | None, storage: Storage) -> list[str]:
    """What checkpoints take and where that is from, in sentences."""
    if asked.checkpoint_takes is not None and asked.pause is not None:
        return []
    per_host = [
        f"{rate / 1e6:g} MB/s a host to {verb}"
        for rate, verb, given in (
            (WRITE_PER_HOST, "write", asked.storage_write),
            (READ_PER_HOST, "read", asked.storage_read),
        )
        if given is None
    ]
    told = (
        f"checkpoints: {size(int(storage.nbytes))}, committed {storage.save_seconds:,.3g} s after they begin "
        f"({size(int(storage.write))}/s), read in {storage.load_seconds:,.3g} s ({size(int(storage.read))}/s)"
    )
    if asked.checkpoint_size is None and job is None:
        told += f"; assumed: {size(int(BYTES_PER_HOST))} a host (--checkpoint-size)"
    if per_host:
        told += (
            f"; {' and '.join(per_host)} are those of one host with an S3 server on the same two cores, and assumed to "
            "grow with the hosts (--storage-write, --storage-read)"
        )
    return [told]
