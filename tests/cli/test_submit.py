"""Ray's own job commands on a running cluster, and a graceful stop of a submitted job."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from elastic_train.controller.local_cluster import LocalCluster
from tests.cli.command import ROOT, elastic_train
from tests.cli.submitted import LONG, server
from tests.jobs import JOB
from tests.ray_job import processes, refill, until, until_none

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


@pytest.fixture
def cluster(ray_cluster: LocalCluster) -> LocalCluster:
    refill(ray_cluster, nodes=2, cpus=2)
    return ray_cluster


@pytest.fixture
def folder(corpus: Path, tmp_path: Path) -> Path:
    """A working directory of the documented shape: ``jobs/pretrain.py`` and ``jobs/configs/small.yaml``."""
    here = tmp_path / "work"
    (here / "jobs" / "configs").mkdir(parents=True)
    shutil.copy(ROOT / "jobs" / "pretrain.py", here / "jobs")
    config = JOB.format(name="small", data=corpus, storage=tmp_path / "runs")
    (here / "jobs" / "configs" / "small.yaml").write_text(config)
    return here


def ray_job(cluster: LocalCluster, folder: Path, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``ray job VERB ARGUMENTS``."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "job", verb, "--address", server(cluster), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def pretrain(cluster: LocalCluster, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    script = ("python", "jobs/pretrain.py", "--config", "jobs/configs/small.yaml", *overrides)
    return ray_job(cluster, folder, "submit", "--working-dir", ".", "--", *script)


def submission(output: str) -> str:
    found = re.search(r"raysubmit_\w+", output)
    assert found is not None, output
    return found[0]


def lines(folder: Path, job: str, name: str) -> list[dict[str, object]]:
    path = folder.parent / "runs" / job / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_job_script_succeeds(cluster: LocalCluster, folder: Path) -> None:
    sent = pretrain(cluster, folder, "name=script", "hosts.max=2", "training.steps=5")
    assert sent.returncode == 0, sent.stdout + sent.stderr
    status = ray_job(cluster, folder, "status", submission(sent.stdout))
    assert " succeeded" in status.stdout
    assert [line["step"] for line in lines(folder, "script", "steps")] == [1, 2, 3, 4, 5]


def test_job_script_fails(cluster: LocalCluster, folder: Path) -> None:
    """RY-01: a job that fails is FAILED for Ray, and `ray job submit` says so by its exit code."""
    wrong = ("optimizer.learning_rate=1e30", "optimizer.weight_decay=0", "schedule.warmup_steps=0")
    sent = pretrain(cluster, folder, "name=failing", "hosts.max=1", *wrong)
    assert sent.returncode != 0
    assert "failure.max_bad_steps=3" in sent.stdout
    status = ray_job(cluster, folder, "status", submission(sent.stdout))
    assert " failed" in status.stdout


def test_stopped_by_rays_own_command_and_through_the_clusters_own_address(cluster: LocalCluster, folder: Path) -> None:
    """`ray job stop` of one submission, then `elastic-train stop` of the next one of the name, without job server."""
    overrides = ("name=ray", "hosts.max=2", *LONG)
    sent = elastic_train("submit", "jobs/configs/small.yaml", *overrides, "--address", server(cluster), cwd=folder)
    assert sent.returncode == 0, sent.stdout + sent.stderr
    until(lambda: len(lines(folder, "ray", "steps")) >= 5, 120)
    where = ("--address", cluster.address)
    shown = elastic_train("status", "ray", *where, cwd=folder)
    assert shown.stdout.startswith("ray | running | step "), shown.stdout + shown.stderr
    stopped = ray_job(cluster, folder, "stop", sent.stdout.split()[1])
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    until_none(lambda: processes(cluster))
    last = lines(folder, "ray", "steps")[-1]["step"]
    ended = lines(folder, "ray", "ledger")[-1]
    assert (ended["event"], ended["status"], ended["step"]) == ("job_finished", "killed", last)
    assert (folder.parent / "runs" / "ray" / "checkpoints" / f"step-{last:08d}-c1.json").is_file()
    sent = elastic_train("submit", "jobs/configs/small.yaml", *overrides, "--address", server(cluster), cwd=folder)
    assert sent.returncode == 0, sent.stdout + sent.stderr
    until(lambda: len(lines(folder, "ray", "steps")) >= last + 2, 120)
    stopped = elastic_train("stop", "ray", *where, cwd=folder)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    until_none(lambda: processes(cluster))
    assert lines(folder, "ray", "ledger")[-1]["step"] == lines(folder, "ray", "steps")[-1]["step"] > last


def test_nothing_is_told_without_the_token(cluster: LocalCluster, folder: Path) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{server(cluster)}/api/jobs/")
    assert refused.value.code == 401
    other = elastic_train("status", "small", "--address", cluster.address, cwd=folder, RAY_AUTH_TOKEN="0" * 64)
    assert other.returncode != 0
    assert "Traceback" not in other.stderr
