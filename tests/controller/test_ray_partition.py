"""Raylets in network namespaces of their own: the chaos command takes a node's link down, and up again."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from elastic_train.cluster.networks import Network
from elastic_train.controller.local_cluster import LocalCluster
from tests.cli.command import elastic_train
from tests.jobs import make_job
from tests.local_job import lines_in_peace
from tests.ray_job import RayJob, alive, pools, processes, until_none
from tests.recovered import assert_recovered

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

LONG = ("training.steps=100000", "checkpoint.every_steps=50", "parallel.pp=1", "hosts.max=2", "hosts.settle_seconds=0")
LEASE = ("failure.lease_seconds=4", "failure.heartbeat_seconds=0.25")


class NetworkCluster(LocalCluster):
    """Its head is on the bridge, every worker node in a namespace of its own."""

    def __init__(self, network: Network) -> None:
        super().__init__(head=network.address)
        self._network = network

    def _place(self) -> tuple[str, Sequence[str]]:
        machine = self._network.add()
        return machine.address, machine.command


def trains_on(status: dict[str, Any], hosts: int) -> bool:
    return status["state"] == "running" and sum(host["rank"] is not None for host in status["hosts"]) == hosts


@pytest.mark.timeout(600)
def test_a_node_whose_link_was_down_is_left_behind_and_another_takes_its_place(corpus: Path, tmp_path: Path) -> None:
    """Ray gives the node up when it does not hear it, and the raylet ends itself when it learns of that."""
    job = make_job(corpus, tmp_path, "cut", *LONG, *LEASE)
    with Network() as network, NetworkCluster(network) as cluster:
        cluster.add_nodes(2, cpus=1)
        with RayJob(job, cluster.address) as run:
            before = run.wait(lambda status: status["step"] >= 5 and trains_on(status, 2))
            trainers = {host["node"]: host["trainer_pid"] for host in before["hosts"]}
            arguments = ("chaos", "partition", "cut", "--lasting", "10s", "--address", cluster.address)
            done = elastic_train(*arguments, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            run.wait(lambda status: status["generation"] >= 2 and trains_on(status, 1))
            (silent,) = run.events("host_silent") or run.events("host_lost")
            assert not alive([trainers[silent["node"]]])
            until_none(lambda: [node for node in cluster.nodes if node.process.poll() is None][2:])
            for node in [node for node in cluster.nodes if node.process.poll() is not None]:
                cluster.kill_node(node)
            cluster.add_nodes(1, cpus=1)
            run.wait(lambda status: status["generation"] >= 3 and trains_on(status, 2))
            run.driver.send_signal(signal.SIGTERM)
            outcome = run.finish()
        until_none(lambda: processes(cluster))
    assert (outcome["state"], outcome["exit_code"]) == ("killed", 143), outcome
    assert "partition: " in done.stdout
    assert "1 faults, 1 generations formed" in done.stdout
    assert "raylet" not in done.stdout, done.stdout  # what Ray says of the dead node
    formed = run.events("generation_formed")
    assert [generation["layout"] for generation in formed] == ["dp_shard2", "single", "dp_shard2"]
    assert formed[1]["step"] >= before["step"]
    assert not run.events("rolled_back")
    assert not pools(run.job)
    calm = make_job(corpus, tmp_path / "calm", "calm", *LONG, "hosts.max=1")
    causes = ["start", silent["event"], "growth"]
    assert_recovered(run.lines, lines_in_peace(calm, outcome["step"]), causes, tolerance=1e-4)
