"""What Ray's autoscaler is asked for and has, watched from a process of its own; and machines that it ordered."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import psutil

_WAIT_SECONDS = 60.0
WATCH_PROGRAM = """
import json, sys, time
from ray.autoscaler.v2.sdk import get_cluster_status

while True:
    status = get_cluster_status(sys.argv[1])
    demands = status.resource_demands
    asked = [*demands.placement_group_demand, *demands.ray_task_actor_demand]
    asked += [one for one in demands.cluster_constraint_demand if one.bundles_by_count]
    nodes = [node for node in [*status.active_nodes, *status.idle_nodes] if node.ray_node_type_name != "head"]
    print(json.dumps({"demand": [str(one) for one in asked], "nodes": len(nodes)}), flush=True)
    time.sleep(0.2)
"""


class ClusterWatch:
    """Context manager. In a process of its own: Ray reads the token when it is imported, as a test may have done."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._looks = 0
        self._seen: dict[str, Any] = {}

    def __enter__(self) -> ClusterWatch:
        command = [sys.executable, "-c", WATCH_PROGRAM, self._address]
        self._program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._program.kill()
        self._program.wait()
        self._reader.join()
        assert self._program.stdout is not None
        self._program.stdout.close()

    def _read(self) -> None:
        assert self._program.stdout is not None
        for line in self._program.stdout:
            self._seen = json.loads(line)
            self._looks += 1

    def look(self) -> dict[str, Any]:
        """What the autoscaler is asked for (``demand``, as text), and how many ``nodes`` there are beside the head."""
        looks, deadline = self._looks, time.monotonic() + _WAIT_SECONDS
        while self._looks < looks + 2:  # the next one may have been under way
            assert time.monotonic() < deadline, "no answer from the cluster"
            time.sleep(0.05)
        return self._seen


def kill_machine(pid: int) -> None:
    """SIGKILL all processes of the local machine that has the process ``pid``."""
    above = psutil.Process(pid).parents()
    root = next(process for process in above if "--block" in process.cmdline())
    for process in [root, *root.children(recursive=True)]:
        os.kill(process.pid, signal.SIGKILL)
