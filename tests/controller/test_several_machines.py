"""A whole life of a job on several machines: each is a namespace of a made-up network, also the head and the services.

Submitted through Ray's job server, trained, a machine cut off, another one taken by its cloud, stopped, and resumed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from elastic_train.cluster.networks import Machine, Network
from elastic_train.config.load import load_job
from elastic_train.controller.job_folder import job_store
from elastic_train.controller.local_cluster import LocalCluster
from elastic_train.controller.local_node import LocalNode
from elastic_train.storage.json_lines import read_json_lines
from tests.cli.command import ROOT
from tests.controller.s3_jobs import Lines, whole_checkpoints
from tests.jobs import JOB, make_job
from tests.local_job import lines_in_peace
from tests.ray_job import processes, until, until_none
from tests.recovered import assert_recovered, recoveries
from tests.s3_server import S3Server, running_s3_server
from tests.spot_instance import notice_in, running_metadata
from tests.tracking.mlflow_server import MlflowServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.timeout(600),
]

OPTIONS = ("parallel.pp=1", "hosts.max=3", "hosts.settle_seconds=0", "schedule.name=constant")
BUSY = {"host_silent", "host_lost", "growth"}
"""Causes that a machine with much else to do can add: a host that gets no turn for a lease is lost, and comes back."""
LEASE = ("failure.lease_seconds=15", "failure.heartbeat_seconds=0.25", "failure.hang_seconds=600")
STOP_WAIT = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120"}}
NOTICE_SECONDS = 120


class MachinesCluster(LocalCluster):
    """The head and every worker node have a machine of their own."""

    def __init__(self, network: Network) -> None:
        head = network.add()
        super().__init__(include_dashboard=True, head=head.address, head_command=head.command)
        self._network = network
        self.machines: dict[str, Machine] = {}
        """of worker nodes, by address"""

    def _place(self) -> tuple[str, Sequence[str]]:
        machine = self._network.add()
        self.machines[machine.address] = machine
        return machine.address, machine.command

    def node_at(self, address: str) -> LocalNode:
        return next(node for node in self.nodes if node.address == address)


class Submitted:
    """The job in the folder ``work``, seen from outside: through Ray's job server, its logs in the bucket, MLflow."""

    def __init__(self, cluster: MachinesCluster, work: Path, *overrides: str) -> None:
        self.cluster, self.work = cluster, work
        self.config = work / "jobs" / "configs" / "small.yaml"
        self.job = load_job(self.config, overrides)
        self._overrides = overrides

    def ray_job(self, verb: str, *arguments: str) -> str:
        where = f"http://{self.cluster.nodes[0].address}:{self.cluster.dashboard_port}"
        command = [sys.executable, "-m", "ray.scripts.scripts", "job", verb, "--address", where, *arguments]
        done = subprocess.run(command, cwd=self.work, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, *options: str, overrides: Sequence[str] = ()) -> str:
        """Id of the submission."""
        script = ("python", "jobs/pretrain.py", "--config", "jobs/configs/small.yaml", *self._overrides, *overrides)
        environment = ("--working-dir", ".", "--runtime-env-json", json.dumps(STOP_WAIT))
        sent = self.ray_job("submit", *environment, *options, "--", *script)
        found = re.search(r"raysubmit_\w+", sent)
        assert found is not None, sent
        return found[0]

    def lines(self, name: str) -> Lines:
        store = job_store(self.job)
        return read_json_lines(store, f"{name}.jsonl") if store.exists(f"{name}.jsonl") else []

    def events(self, name: str) -> Lines:
        return [event for event in self.lines("ledger") if event["event"] == name]

    def await_step(self, hosts: int, beyond: int) -> dict[str, Any]:
        """The line of a step after ``beyond`` that so many hosts have finished."""

        def done() -> bool:
            last = self.lines("steps")[-1:]
            return bool(last and last[0]["step"] > beyond and last[0]["layout"] == layout)

        layout = "single" if hosts == 1 else f"dp_shard{hosts}"
        until(done, 120)
        return self.lines("steps")[-1]


@contextmanager
def services(network: Network, folder: Path) -> Iterator[tuple[S3Server, MlflowServer]]:
    """Object storage and MLflow on a machine of their own. They start beside each other."""
    machine = network.add()
    mlflow = MlflowServer(folder, machine.address, machine.command)
    starting = threading.Thread(target=mlflow.start)
    starting.start()
    try:
        with running_s3_server(address=machine.address, prefix=machine.command) as storage:
            starting.join()
            yield storage, mlflow
    finally:
        starting.join()
        mlflow.kill()


@contextmanager
def watched_machine(cluster: MachinesCluster, address: str, metadata_url: str) -> Iterator[None]:
    """Meanwhile the machine's watch for the cloud's notice runs, as the cluster files have it run."""
    program = [sys.executable, "-m", "elastic_train.cli.main", "cluster", "watch-spot", "--cloud", "aws"]
    program += ["--endpoint", metadata_url, "--address", cluster.address]
    process = subprocess.Popen([*cluster.machines[address].command, *program])
    try:
        yield
        assert process.poll() is None, "the watch has ended"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as network:
        yield network


@pytest.fixture
def submitted(network: Network, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Submitted]:
    """Not submitted yet. A head, and worker machines are to be added."""
    with ExitStack() as stack:
        storage, mlflow = stack.enter_context(services(network, tmp_path))
        for name, value in storage.environment.items():
            monkeypatch.setenv(name, value)  # the machines inherit it, as from an instance's role
        bucket = storage.create_bucket("runs")
        work = tmp_path / "work"
        (work / "jobs" / "configs").mkdir(parents=True)
        shutil.copy(ROOT / "jobs" / "pretrain.py", work / "jobs")
        config = JOB.format(name="several", data=corpus, storage=f"s3://{bucket}/jobs")
        (work / "jobs" / "configs" / "small.yaml").write_text(config)
        where = (f"storage.endpoint_url={storage.endpoint_url}", f"tracking.uri={mlflow.uri}")
        cluster = stack.enter_context(MachinesCluster(network))
        yield Submitted(cluster, work, "training.steps=100000", "tracking.enabled=true", *OPTIONS, *LEASE, *where)


def test_a_job_lives_through_a_partition_a_spot_notice_a_stop_and_a_resubmission(
    submitted: Submitted, network: Network, corpus: Path, tmp_path: Path
) -> None:
    cluster = submitted.cluster
    cluster.add_nodes(3, cpus=1)
    first = submitted.submit("--no-wait")
    step = submitted.await_step(hosts=3, beyond=2)["step"]

    cut, taken, _ = (node.address for node in cluster.nodes[1:])
    cluster.machines[cut].cut()
    step = submitted.await_step(hosts=2, beyond=step)["step"]
    cluster.kill_node(cluster.node_at(cut))  # what comes back: test_ray_partition.py

    with running_metadata(network.address) as metadata, watched_machine(cluster, taken, metadata.url):
        metadata.answer = 200, notice_in(NOTICE_SECONDS)
        step = submitted.await_step(hosts=1, beyond=step)["step"]
        until(lambda: submitted.events("host_left"))
    cluster.kill_node(cluster.node_at(taken))

    submitted.ray_job("stop", first)
    assert "STOPPED" in submitted.ray_job("status", first).upper()
    until_none(lambda: processes(cluster))
    stopped = submitted.lines("steps")[-1]["step"]
    assert submitted.lines("ledger")[-1]["status"] == "killed"
    assert whole_checkpoints(submitted.job)[-1] == stopped

    cluster.add_nodes(1, cpus=1)
    end = stopped + 10
    second = submitted.submit(overrides=["hosts.min=2", f"training.steps={end}"])  # waits for the end
    assert "SUCCEEDED" in submitted.ray_job("status", second).upper()

    until_none(lambda: processes(cluster))
    calm = make_job(corpus, tmp_path / "calm", "calm", *OPTIONS, "hosts.max=1", f"training.steps={end}")
    causes = recoveries(submitted.lines("ledger"))
    assert [cause for cause in causes if cause not in BUSY] == ["start", "preemption", "start"]
    assert {"host_silent", "host_lost"} & set(causes[: causes.index("preemption")])
    assert_recovered(submitted.lines, lines_in_peace(calm, end), causes, tolerance=1e-4)
    (notice,) = submitted.events("preemption_notice")
    assert "spot notice: terminate" in notice["reason"] or notice["reason"] == "drained by Ray"
    assert whole_checkpoints(submitted.job)[-1] == end
    client = MlflowClient(tracking_uri=submitted.job.tracking.uri)
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
    (whole,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]  # the others are its generations
    assert client.get_metric_history(whole.info.run_id, "loss")[-1].step == end
