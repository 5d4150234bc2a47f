"""A Ray cluster with a real autoscaler: a head without CPUs, and worker nodes of one CPU that Ray starts when asked."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from elastic_train.controller.local_cluster import free_port, share_token

_HEAD_ID = "f" * 51 + "00000"
"""The head's node id, as Ray's fake provider counts them."""
_START_SECONDS = 60.0
WATCH_PROGRAM = """
import json, sys, time
from ray.autoscaler.v2.sdk import get_cluster_status

while True:
    status = get_cluster_status(sys.argv[1])
    demands = status.resource_demands
    asked = [*demands.placement_group_demand, *demands.ray_task_actor_demand]
    asked += [one for one in demands.cluster_constraint_demand if one.bundles_by_count]
    nodes = [node for node in [*status.active_nodes, *status.idle_nodes] if node.ray_node_type_name == "seat"]
    print(json.dumps({"demand": [str(one) for one in asked], "nodes": len(nodes)}), flush=True)
    time.sleep(0.2)
"""


class AutoscalingCluster:
    """Context manager. ``provider``: Ray's ``fake_multinode``, which starts raylets on this machine."""

    def __init__(self, most_nodes: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="et-autoscaling-"))
        self._port = free_port("0.0.0.0")
        self._most_nodes = most_nodes
        self._watcher: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"{own_address()}:{self._port}"

    def _config(self) -> dict[str, Any]:
        return {
            "cluster_name": "fake",
            "max_workers": self._most_nodes,
            "idle_timeout_minutes": 60,
            "upscaling_speed": 10,
            "provider": {
                "type": "fake_multinode",
                "use_node_id_as_ip": True,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
                "gcs_address": self.address,
                "head_node_id": _HEAD_ID,
            },
            "auth": {},
            "available_node_types": {
                "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
                "seat": {
                    "resources": {"CPU": 1, "object_store_memory": 100_000_000},
                    "node_config": {},
                    "min_workers": 0,
                    "max_workers": self._most_nodes,
                },
            },
            "head_node_type": "ray.head.default",
            "docker": {},
            "initialization_commands": [],
            "setup_commands": [],
            "head_setup_commands": [],
            "worker_setup_commands": [],
            "head_start_ray_commands": [],
            "worker_start_ray_commands": [],
            "file_mounts": {},
            "cluster_synced_files": [],
            "file_mounts_sync_continuously": False,
            "rsync_exclude": [],
            "rsync_filter": [],
        }

    def __enter__(self) -> AutoscalingCluster:
        share_token()
        config = self._folder / "cluster.yaml"
        config.write_text(json.dumps(self._config()))
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={self._port}"]
        command += ["--num-cpus=0", f"--temp-dir={self._folder / 'ray'}", f"--autoscaling-config={config}"]
        command += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
        command += ["--dashboard-agent-grpc-port=0", "--metrics-export-port=0", "--runtime-env-agent-port=0"]
        command += ["--include-dashboard=false", "--object-store-memory=100000000", "--disable-usage-stats"]
        environment = {
            "RAY_FAKE_CLUSTER": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_CLOUD_INSTANCE_ID": _HEAD_ID,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD_ID,
            "RAY_worker_niceness": "0",
        }
        self._log = self._folder / "head.log"
        with self._log.open("wb") as output:
            self._head = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=os.environ | environment
            )
        deadline = time.monotonic() + _START_SECONDS
        while "Ray runtime started" not in self._log.read_text():
            if self._head.poll() is not None or time.monotonic() > deadline:
                text = self._log.read_text()
                self.__exit__()
                raise AssertionError(f"the head did not come up: {text[-2000:]}")
            time.sleep(0.1)
        # In a process of its own: Ray reads the token when it is imported, which a test may have done before.
        self._watcher = subprocess.Popen(
            [sys.executable, "-c", WATCH_PROGRAM, self.address], stdout=subprocess.PIPE, text=True
        )
        self._looks, self._seen = 0, {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher.wait()
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self._head.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _processes(self) -> list[psutil.Process]:
        """All of the cluster, also the nodes that the autoscaler started: their command lines name its folder."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and any(str(self._folder) in word for word in process.cmdline()):
                    found += [process, *process.children(recursive=True)]
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def _read(self) -> None:
        assert self._watcher is not None
        assert self._watcher.stdout is not None
        for line in self._watcher.stdout:
            self._seen = json.loads(line)
            self._looks += 1

    def look(self) -> dict[str, Any]:
        """What the autoscaler is asked for (``demand``, as text), and how many ``nodes`` with a seat there are."""
        looks, deadline = self._looks, time.monotonic() + _START_SECONDS
        while self._looks < looks + 2:  # the next one may have been under way
            assert time.monotonic() < deadline, "no answer from the cluster"
            time.sleep(0.05)
        return self._seen


def own_address() -> str:
    """This machine's address on its default route: Ray replaces loopback addresses by it, and nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("8.8.8.8", 80))
        return str(probe.getsockname()[0])
