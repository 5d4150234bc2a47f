"""The cloud on this machine, asked as Ray's autoscaler asks it, with real raylets as plain processes on loopback.

With namespaces and the autoscaler itself: ``tests/controller/test_autoscaling.py``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import TAG_RAY_NODE_KIND, TAG_RAY_USER_NODE_TYPE
from ray.autoscaler.v2.instance_manager.node_provider import NodeProviderAdapter

from elastic_train.cluster.local_machines import HEAD_ID, LocalMachines
from elastic_train.cluster.networks import Network, NetworkError
from elastic_train.controller.local_cluster import LocalCluster
from tests.cli.command import ROOT, elastic_train
from tests.ray_job import alive, until, until_none

WORKER = {TAG_RAY_NODE_KIND: "worker", TAG_RAY_USER_NODE_TYPE: "machine"}
OTHERS = {TAG_RAY_NODE_KIND: "unmanaged"}


def machines(folder: Path, head: str) -> LocalMachines:
    place: dict[str, Any] = {"head": head, "head_node_type": "top", "folder": str(folder), "bridge": None}
    return LocalMachines({"type": "external", **place}, "here")


@pytest.fixture
def provider(ray_cluster: LocalCluster, tmp_path: Path) -> Iterator[LocalMachines]:
    provider = machines(tmp_path, ray_cluster.address)
    yield provider
    provider.terminate_nodes(provider.non_terminated_nodes(WORKER))


def order(provider: LocalMachines, count: int = 1) -> None:
    provider.create_node_with_resources_and_labels({}, WORKER, count, {"CPU": 1, "disk": 2}, {"market-type": "spot"})


@pytest.mark.slow
@pytest.mark.cluster
def test_machines_join_and_are_gone_when_given_back_or_dead(provider: LocalMachines) -> None:
    order(provider, count=2)
    first, second = provider.non_terminated_nodes(WORKER)
    assert provider.non_terminated_nodes({}) == [HEAD_ID, first, second]
    assert (provider.is_running(first), provider.is_terminated(first)) == (True, False)
    assert provider.internal_ip(first) != provider.internal_ip(second)
    assert provider.node_tags(first) == WORKER
    provider.set_node_tags(first, {"note": "mine"})
    assert provider.non_terminated_nodes({"note": "mine"}) == [first]

    pids = provider._running[first].node.pids()
    assert len(pids) > 1
    provider.terminate_node(first)
    provider.terminate_node(first)  # as Ray does when it has not heard yet
    assert provider.non_terminated_nodes(WORKER) == [second]
    until_none(lambda: alive(pids))

    os.kill(provider._running[second].node.process.pid, signal.SIGKILL)
    until(lambda: provider.non_terminated_nodes(WORKER) == [])
    assert provider.is_terminated(second)


def test_a_machine_that_cannot_join_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray orders another one then."""
    provider = machines(tmp_path, "127.0.0.1:1")
    monkeypatch.setattr("elastic_train.controller.local_node.sys.executable", "false")
    order(provider)
    assert provider.non_terminated_nodes({}) == [HEAD_ID]
    assert provider.non_terminated_nodes(OTHERS) == []


def test_namespaces_where_no_program_makes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("cluster", "local", str(ROOT / "cluster" / "local.yaml"), "--namespaces")
    refused = elastic_train(*words, cwd=tmp_path, PATH=str(tmp_path))
    assert refused.returncode == 2
    assert "install iproute2, or give --no-namespaces" in refused.stderr

    (tmp_path / "ip").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (tmp_path / "ip").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("elastic_train.cluster.networks._COMMAND_SECONDS", 0.1)
    with pytest.raises(NetworkError, match=r"ip netns list did not end within 0\.1 seconds"), Network():
        pass


def test_the_head_is_not_ours_to_end(tmp_path: Path) -> None:
    provider = machines(tmp_path, "127.0.0.9:6379")
    provider.terminate_node(HEAD_ID)
    assert provider.is_running(HEAD_ID)
    assert provider.internal_ip(HEAD_ID) == provider.external_ip(HEAD_ID) == "127.0.0.9"
    assert provider.node_tags(HEAD_ID)[TAG_RAY_USER_NODE_TYPE] == "top"


def test_ray_asks_for_no_more_than_there_is(tmp_path: Path) -> None:
    """Contract: the methods that version 2 of the autoscaler calls of a provider that is not its own."""
    called = {name.removeprefix("_v1_") for name in vars(NodeProviderAdapter) if name.startswith("_v1_")}
    ours = {name for name in vars(LocalMachines) if not name.startswith("_")} | {"terminate_nodes"}
    assert called - ours <= {"post_process", "safe_to_scale"}
    assert hasattr(NodeProvider, "create_node_with_resources_and_labels")
    adapter = NodeProviderAdapter(machines(tmp_path, "127.0.0.9:6379"), config_reader=None)
    (head,) = adapter.get_non_terminated().values()
    assert (head.cloud_instance_id, head.node_type, head.is_running) == (HEAD_ID, "top", True)
