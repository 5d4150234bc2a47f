"""Jobs through the job server of a real cluster: `elastic-train submit` and `ray job submit` of the job script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from elastic_train.cli.submission import EXCLUDES, runtime_environment
from elastic_train.controller.local_cluster import LocalCluster
from tests.cli.command import elastic_train
from tests.config.job_files import GOOD

pytestmark = pytest.mark.cluster

STEPS = 3


def test_runtime_environment() -> None:
    """RY-03, and time for a last checkpoint when the job is stopped."""
    environment = runtime_environment("/folder")
    assert environment["working_dir"] == "/folder"
    assert {".git", ".venv", "runs", "outputs", "mlruns", "*.safetensors", "*.bin"} <= set(EXCLUDES)
    assert environment["env_vars"] == {"RAY_JOB_STOP_SIGNAL": "SIGTERM", "RAY_JOB_STOP_WAIT_TIME_S": "60"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(include_dashboard=True) as cluster:
        cluster.add_nodes(1, cpus=2)
        yield cluster


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a job file and its data; job folders go beside it, not into Ray's copy of it."""
    here = tmp_path / "work"
    here.mkdir()
    (here / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    job = yaml.safe_load(GOOD) | {
        "storage": {"uri": str(tmp_path / "runs")},
        "data": {"uri": str(tmp_path / "data"), "sequence_length": 32},
        "training": {"steps": STEPS, "global_batch": 8},
        "hosts": {"min": 1, "max": 2},
        "tracking": {"enabled": False},
    }
    job["model"]["vocab_size"] = 300
    (here / "job.yaml").write_text(yaml.safe_dump(job))
    made = elastic_train(
        "data", "prepare", "--corpus", "text.txt", "--out", str(tmp_path / "data"), "--vocab-size", "280", cwd=here
    )
    assert made.returncode == 0, made.stderr
    return here


def finished_steps(folder: Path, name: str) -> list[int]:
    lines = (folder.parent / "runs" / name / "steps.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.slow
def test_submit_and_wait(cluster: LocalCluster, folder: Path) -> None:
    server = f"http://{cluster.nodes[0].address}:{cluster.dashboard_port}"
    result = elastic_train("submit", "job.yaml", "name=sent", "--address", server, "--wait", cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("submission: sent-")
    assert lines[2] == f"log:        ray job logs --follow --address {server} {lines[0].split()[1]}"
    assert lines[-1].endswith(": SUCCEEDED")
    assert finished_steps(folder, "sent") == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_a_job_that_fails_fails_the_command(cluster: LocalCluster, folder: Path) -> None:
    """RY-01: the data are gone by the time the job starts."""
    server = f"http://{cluster.nodes[0].address}:{cluster.dashboard_port}"
    result = elastic_train("submit", "job.yaml", "data.uri=/nowhere", "--address", server, "--wait", cwd=folder)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "error: /nowhere has no manifest.json" in result.stdout
    assert result.stdout.splitlines()[-1].endswith(": FAILED")
