"""``elastic-train cluster local``, and a driver whose Ray is not the cluster's."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from elastic_train.controller.local_cluster import LocalCluster
from tests.cli.command import ROOT, elastic_train
from tests.ray_job import alive, until, until_none

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

OTHER_RAY = """
import sys, ray
from elastic_train.controller.ray_connection import JobError
from elastic_train.controller.run import run_job
from tests.jobs import make_job
ray.__version__ = "2.40.0"
try:
    run_job(make_job("data", "runs", "other"), address=sys.argv[1])
except JobError as error:
    print(error)
"""


@contextmanager
def cluster_here(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """``cluster local`` in ``folder``, with a token that it makes itself."""
    command = [sys.executable, "-m", "elastic_train.cli.main", "cluster", "local", str(ROOT / "cluster" / "local.yaml")]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN"}
    environment["PYTHONPATH"] = str(ROOT)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def head_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The root of its processes; there are short-lived ones of ``ip``, too."""
    with suppress(psutil.NoSuchProcess):
        return [child for child in psutil.Process(process.pid).children() if "--head" in child.cmdline()]
    return []


def assert_nothing_is_left(pid: int, children: list[psutil.Process]) -> None:
    assert children
    until_none(lambda: alive([child.pid for child in children if child.is_running()]))
    if os.geteuid() == 0:
        assert f"et{pid}." not in subprocess.check_output(["ip", "netns", "list"], text=True)
        assert f"et{pid}." not in subprocess.check_output(["ip", "-brief", "link"], text=True)


def test_a_cluster_here_says_how_to_use_it_and_leaves_nothing(tmp_path: Path) -> None:
    with cluster_here(tmp_path) as process:
        assert process.stdout is not None
        said = "".join(process.stdout.readline() for _ in range(4))
        file = Path(said.splitlines()[0].removeprefix(". "))
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        printed = subprocess.check_output(["sh", "-c", f"{said}env"], text=True)
        exported = dict(line.split("=", 1) for line in printed.splitlines() if line.startswith("RAY_"))
        assert exported["RAY_AUTH_TOKEN"] not in said
        children = psutil.Process(process.pid).children(recursive=True)
        status = elastic_train("status", "nobody", "--address", exported["RAY_ADDRESS"], cwd=tmp_path, **exported)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert "RAY_API_SERVER_ADDRESS" in exported
    assert "nobody" in status.stderr
    assert "no Ray cluster answers" not in status.stderr
    assert_nothing_is_left(process.pid, children)


def test_a_cluster_here_ends_with_its_head(tmp_path: Path) -> None:
    with cluster_here(tmp_path) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        children = psutil.Process(process.pid).children(recursive=True)
        (head,) = head_of(process)
        head.kill()
        assert process.wait(60) == 2
        assert "the head of the cluster has died" in process.stderr.read()
    assert_nothing_is_left(process.pid, children)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_cluster_here_can_be_given_up_while_it_comes_up(tmp_path: Path, number: signal.Signals) -> None:
    with cluster_here(tmp_path) as process:
        until(lambda: head_of(process))
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert process.wait(60) == 130
    assert_nothing_is_left(process.pid, children)


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
