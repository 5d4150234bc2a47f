"""A preparation in a process of its own that kills itself in the middle of its work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from elastic_train.config.operation import StorageConfig
from elastic_train.controller.ray_prepare import cluster_runner
from elastic_train.data.corpus import open_corpus
from elastic_train.data.prepare import prepare
from elastic_train.data.stages import one_by_one
from tests.cli.command import ROOT

VOCABULARY = 300
SMALL = {"shard_tokens": 2000, "batch_tokens": 256, "part_bytes": 9000}


def run(
    source: Path, out: str, *, kill: str | None = None, endpoint: str | None = None, ray: str | None = None
) -> dict[str, int] | None:
    """Prepares ``source`` into ``out``; None when it was killed, else how many bytes of each phase were done before.

    ``kill``: the phase in whose middle it kills itself. ``endpoint``: of object storage. ``ray``: address of a cluster.
    """
    order = {"source": str(source), "out": out, "kill": kill, "endpoint": endpoint, "ray": ray}
    done = subprocess.run(
        [sys.executable, "-m", "tests.data.killed_prepare", json.dumps(order)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == -signal.SIGKILL:
        return None
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def _prepare(source: str, out: str, kill: str | None, endpoint: str | None, ray: str | None) -> None:
    before: dict[str, int] = {}

    def look(phase: str, done: int, total: int) -> None:
        before.setdefault(phase, done)
        if phase == kill and done > total / 3:
            os.kill(os.getpid(), signal.SIGKILL)

    storage = StorageConfig(endpoint_url=endpoint) if endpoint else None
    with cluster_runner(ray) if ray else nullcontext(one_by_one) as work:
        options: dict[str, Any] = {**SMALL, "run": work, "progress": look, "storage": storage}
        prepare(open_corpus(source), out, VOCABULARY, **options)
    print(json.dumps(before))


if __name__ == "__main__":
    _prepare(**json.loads(sys.argv[1]))
