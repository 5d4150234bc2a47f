"""``elastic-train cluster local``, and a driver whose Ray is not the cluster's."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from elastic_train.controller.local_cluster import LocalCluster
from tests.cli.command import ROOT, elastic_train
from tests.ray_job import alive, until_none

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

OTHER_RAY = """
import sys, ray
from elastic_train.controller.run import JobError, run_job
from tests.jobs import make_job
ray.__version__ = "2.40.0"
try:
    run_job(make_job("data", "runs", "other"), address=sys.argv[1])
except JobError as error:
    print(error)
"""


def test_a_cluster_here_says_how_to_use_it_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "elastic_train.cli.main", "cluster", "local", str(ROOT / "cluster" / "local.yaml")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = [process.stdout.readline() for _ in range(4)]
            exported = dict(re.findall(r"(\w+)=(\S+)", " ".join(said)))
            before = psutil.Process(process.pid).children(recursive=True)
            status = elastic_train("status", "nobody", "--address", exported["RAY_ADDRESS"], cwd=tmp_path)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert "RAY_API_SERVER_ADDRESS" in exported
    assert "nobody" in status.stderr
    assert "no Ray cluster answers" not in status.stderr
    assert before
    until_none(lambda: alive([child.pid for child in before if child.is_running()]))
    if os.geteuid() == 0:
        assert f"et{process.pid}." not in subprocess.check_output(["ip", "netns", "list"], text=True)
        assert f"et{process.pid}." not in subprocess.check_output(["ip", "-brief", "link"], text=True)


def test_clusters_elsewhere_are_not_started_here(tmp_path: Path) -> None:
    done = elastic_train("cluster", "local", str(ROOT / "cluster" / "aws.yaml"), cwd=tmp_path)
    assert done.returncode == 2
    assert "provider.type=aws needs `ray up`; here it must be external" in done.stderr


def test_another_ray_is_named_with_that_of_the_cluster(ray_cluster: LocalCluster, tmp_path: Path) -> None:
    """RY-09."""
    done = subprocess.run(
        [sys.executable, "-c", OTHER_RAY, ray_cluster.address],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("this is another Ray or Python than the cluster's: "), done.stdout + done.stderr
    python = ".".join(map(str, sys.version_info[:3]))
    assert re.search(rf"cluster was started with: Ray: 2\.6\S+ Python: {re.escape(python)} ", done.stdout)
    assert f"Ray: 2.40.0 Python: {python}" in done.stdout
