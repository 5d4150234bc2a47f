"""A hundred random failures in one job leave nothing behind, neither while it goes on nor after its end."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_train.controller.local_cluster import LocalCluster
from tests.controller.processes import program
from tests.jobs import make_job
from tests.ray_job import RayJob, drain, kill_coordinator, pools, processes, refill, until, until_none

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

KINDS = {"trainer": 82, "hang": 8, "host": 6, "coordinator": 2, "drain": 2}
"""How many of each. A killed host costs the start of another, a drain that of a node; trainers are what dies most."""
HOSTS = ("ray::RayTrainWorker", "ray::_JoinerHost")
PLACEMENT_GROUPS = """
import json, sys
import ray
from ray.util import placement_group_table
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(json.dumps([group["state"] for group in placement_group_table().values() if group["state"] != "REMOVED"]))
"""


def placement_groups(cluster: LocalCluster) -> list[str]:
    """States of those that have not been removed."""
    with program(PLACEMENT_GROUPS, cluster.address) as asked:
        states: list[str] = json.loads(asked.hear())
    return states


def whole(status: dict[str, Any]) -> bool:
    """Four trainers step."""
    return status["state"] == "running" and [host["rank"] is None for host in status["hosts"]] == [False] * 4


def in_random_order(chance: random.Random) -> list[str]:
    """One of each kind comes first: then every cache, thread and buffer has been made."""
    others = [kind for kind, count in KINDS.items() for _ in range(count - 1)]
    chance.shuffle(others)
    return [*KINDS, *others]


def strike(run: RayJob, cluster: LocalCluster, kind: str, chance: random.Random) -> None:
    """One failure, as soon as all hosts train; returns once the job has recovered."""
    status = run.wait(whole)
    host = chance.choice(status["hosts"])
    if kind == "coordinator":
        replace_coordinator(run, cluster)
        return
    if kind == "drain":
        take_away(run, cluster, host)
    else:
        pid = host["pid"] if kind == "host" else host["trainer_pid"]
        os.kill(pid, signal.SIGSTOP if kind == "hang" else signal.SIGKILL)
    generation = status["generation"]
    run.wait(lambda status: status["generation"] > generation and status["state"] == "running")


def replace_coordinator(run: RayJob, cluster: LocalCluster) -> None:
    """Kill it and wait until the next one tells that it is there."""
    killed = time.time()
    kill_coordinator(cluster)
    run.wait(
        lambda status: any(
            event["event"] == "coordinator_returned" and event["time"] > killed for event in status["last_events"]
        )
    )


def take_away(run: RayJob, cluster: LocalCluster, host: dict[str, Any]) -> None:
    """Drain the node of ``host``, end it when the job has left it, and start another."""
    node = cluster.node_of(host["pid"])
    assert node is not None
    assert drain(cluster, host["node"]) == ""
    run.wait(lambda status: all(other["node"] != host["node"] for other in status["hosts"]))
    cluster.kill_node(node)
    refill(cluster, nodes=2, cpus=2)


def held(run: RayJob, cluster: LocalCluster) -> dict[str, Any]:
    """What the job holds at this moment: processes by kind, file descriptors, sockets, shared memory."""
    ours = [psutil.Process(int(line.split()[0])) for line in processes(cluster)]
    hosts = {host["pid"] for host in run.status["hosts"]}
    family = [process for process in ours if process.pid in hosts or ":CoordinatorActor" in " ".join(process.cmdline())]
    return {
        "processes": Counter(kind_of(process) for process in ours),
        "descriptors": max(process.num_fds() for process in family),
        "threads": max(process.num_threads() for process in family),
        "listening": sum(
            connection.status == psutil.CONN_LISTEN for process in ours for connection in process.net_connections()
        ),
        "images": sum(path.suffix == ".img" for pool in pools(run.job) for path in pool.rglob("*")),
        "groups": placement_groups(cluster),
    }


def kind_of(process: psutil.Process) -> str:
    """Its title without the number of the rank; a host is one, whether Ray Train started it or it is a replacement."""
    title = process.cmdline()[0].split()[0].rstrip("0123456789")
    return "host" if title.startswith(HOSTS) else title


@pytest.mark.timeout(900)
def test_a_hundred_failures_leave_nothing_behind(ray_cluster: LocalCluster, corpus: Path, tmp_path: Path) -> None:
    refill(ray_cluster, nodes=2, cpus=2)
    folders = set(Path(tempfile.gettempdir()).glob("elastic_train-*"))
    job = make_job(
        corpus,
        tmp_path,
        "leaks",
        "training.steps=1000000",
        "checkpoint.every_steps=200",
        "parallel.pp=1",
        "hosts.settle_seconds=0.1",
        "failure.hang_seconds=1.5",
        "log.samples=false",
    )
    chance = random.Random(5)
    failures = in_random_order(chance)
    with RayJob(job, ray_cluster.address) as run:
        for kind in failures[: len(KINDS)]:
            strike(run, ray_cluster, kind, chance)
        run.wait(whole)
        before = held(run, ray_cluster)
        for kind in failures[len(KINDS) :]:
            strike(run, ray_cluster, kind, chance)
        run.wait(whole)
        until(lambda: held(run, ray_cluster)["images"] <= before["images"])  # copies come after the step
        after = held(run, ray_cluster)
        run.driver.send_signal(signal.SIGTERM)
        outcome = run.finish()
    assert len(failures) == sum(KINDS.values()) == 100
    assert (outcome["state"], outcome["exit_code"]) == ("killed", 143), outcome
    assert run.noise == []
    for name in ("processes", "listening", "groups"):
        assert after[name] == before[name], name
    for name in ("descriptors", "threads"):
        assert after[name] <= before[name] + 10, f"{name}: {before[name]} after 5 failures, {after[name]} after 100"
    until_none(lambda: processes(ray_cluster))
    until_none(lambda: placement_groups(ray_cluster))
    assert not pools(job)
    assert set(Path(tempfile.gettempdir()).glob("elastic_train-*")) <= folders
