"""The job's state at a glance, as JSON values: what ``elastic-train status`` and the live view show."""

from __future__ import annotations

import itertools
from typing import Any

from elastic_train.controller.coordinator import Coordinator
from elastic_train.controller.current_run import CurrentRun
from elastic_train.controller.host_record import HostRecord

_COUNTS = ("step", "time_account")
"""What comes again and again; the status says it in its own words."""


def status_of(coordinator: Coordinator, events: list[dict[str, Any]], most_hosts: int | None = None) -> dict[str, Any]:
    """A snapshot of the coordinator.

    ``step`` is the newest finished step, ``loss``/``lr``/``grad_norm`` are its values, ``seconds`` its duration,
    ``data_seconds`` how long it waited for its samples; ``tokens_per_second`` follows from them. ``hosts`` has one
    entry per connected host, of ``most_hosts`` at most; ``host_count`` is the number of all. ``time`` is the time
    account of this run (``TimeAccount.report``).
    """
    run = coordinator.run
    generation, line = run.generation, run.log.last_line
    status: dict[str, Any] = {
        "name": run.job.name,
        "state": run.state.value,
        "message": run.message,
        "traceback": run.traceback,
        "step": run.log.finished_step,
        "steps": run.job.training.steps,
        "generation": generation.number if generation else 0,
        "layout": str(generation.layout) if generation else "",
        "hosts": _hosts(run, most_hosts),
        "host_count": len(run.members.hosts),
        "spares": _spares(run),
        "last_events": [event for event in events[-50:] if event["event"] not in _COUNTS][-10:],
    }
    status["time"] = run.time.report()
    status |= {key: line.get(key) for key in ("loss", "grad_norm", "lr", "seconds", "data_seconds")}
    if line:
        status["tokens_per_second"] = line["valid_tokens"] / line["seconds"]
    return status


def _spares(run: CurrentRun) -> int:
    generation = run.generation
    hosts = [host for host in run.members.hosts.values() if host.usable]
    return sum(generation is None or not generation.has(host) for host in hosts)


def _hosts(run: CurrentRun, most: int | None) -> list[dict[str, Any]]:
    generation = run.generation
    hosts = []
    for host in itertools.islice(run.members.hosts.values(), most):
        rank = generation.rank_of(host) if generation else None
        hosts.append(
            {
                "id": host.number,
                "node": host.node,
                "address": host.address,
                "pid": host.pid,
                "trainer_pid": host.trainer_pid,
                "rank": rank,
                "state": _state(host, rank),
                "pool": host.pool,
            }
        )
    return hosts


def _state(host: HostRecord, rank: int | None) -> str:
    if host.leaving:
        return "leaving"
    if not host.ready:
        return "starting"
    return "training" if rank is not None else "spare" if host.usable else "full"
