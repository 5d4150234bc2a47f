"""Jobs that were sent to the job server of a cluster, as tests see them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_train.controller.local_cluster import LocalCluster
from tests.cli.command import elastic_train
from tests.ray_job import until

LONG = ("training.steps=1000000", "checkpoint.every_steps=1000000")


def server(cluster: LocalCluster) -> str:
    return f"http://{cluster.nodes[0].address}:{cluster.dashboard_port}"


class Submitted:
    """The jobs of one working directory, ``folder``, on one cluster. Job folders are in ``runs`` beside it."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self._server, self._folder = server(cluster), folder

    def send(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        """``elastic-train submit`` of ``job.yaml``, which must be taken."""
        sent = self.ask("submit", "job.yaml", f"name={name}", *words)
        assert sent.returncode == 0, sent.stdout + sent.stderr
        return sent

    def ask(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Any verb, with the address of the job server."""
        return elastic_train(*words, "--address", self._server, cwd=self._folder, **environment)

    def lines(self, name: str, log: str) -> list[dict[str, Any]]:
        """Of steps.jsonl or ledger.jsonl; none while there is no such file."""
        path = self._folder.parent / "runs" / name / f"{log}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines(name, "ledger") if line["event"] == event]

    def wait_for_steps(self, names: Sequence[str], count: int = 3) -> None:
        until(lambda: all(len(self.lines(name, "steps")) >= count for name in names), 120)
