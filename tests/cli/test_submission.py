"""What `elastic-train submit` sends, what comes of it, and what it refuses to send."""

from __future__ import annotations

import http.server
import json
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
import yaml
from ray._private.runtime_env.packaging import create_package

from elastic_train.cli.submission import EXCLUDES, runtime_environment
from elastic_train.controller.local_cluster import LocalCluster
from elastic_train.controller.working_tree import uploaded_files
from tests.cli.command import elastic_train
from tests.cli.submitted import Submitted
from tests.config.job_files import GOOD
from tests.ray_job import refill

STEPS = 3


@pytest.fixture
def cluster(ray_cluster: LocalCluster) -> LocalCluster:
    refill(ray_cluster, nodes=2, cpus=2)
    return ray_cluster


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a job file and its text; data and job folders go beside it."""
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
    return here


@pytest.fixture
def jobs(cluster: LocalCluster, folder: Path) -> Submitted:
    return Submitted(cluster, folder)


def test_runtime_environment() -> None:
    """RY-03, and time for a last checkpoint when the job is stopped."""
    environment = runtime_environment("/folder")
    assert environment["working_dir"] == "/folder"
    assert {".git", ".venv", "runs", "outputs", "mlruns", "*.safetensors", "*.bin"} <= set(EXCLUDES)
    assert environment["env_vars"] == {"RAY_JOB_STOP_SIGNAL": "SIGTERM", "RAY_JOB_STOP_WAIT_TIME_S": "60"}


@pytest.mark.slow
@pytest.mark.cluster
def test_a_job_that_fails_fails_the_command(jobs: Submitted) -> None:
    """RY-01: the data are gone by the time the job starts. The sentence is in the log, also later."""
    result = jobs.ask("submit", "job.yaml", "name=failing", "data.uri=/nowhere", "--wait")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "error: /nowhere has no manifest.json" in result.stdout
    assert result.stdout.splitlines()[-1].endswith(": FAILED")
    later = jobs.ask("logs", "failing")
    assert later.returncode == 0
    assert "error: /nowhere has no manifest.json" in later.stdout
    assert "Traceback" not in later.stdout
    assert jobs.ask("logs", "failing", "--follow").returncode == 1


def sparse(path: Path, mebibytes: int) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.truncate(mebibytes * 2**20)


def test_a_folder_that_is_too_large_is_refused(folder: Path) -> None:
    """RY-03: before anything is sent, so there need not even be a cluster."""
    sparse(folder / "weights" / "layer.npy", 600)
    sparse(folder / "model.safetensors", 900)  # is left out
    sparse(folder / "notes.txt", 2)
    result = elastic_train("submit", "job.yaml", "--address", "http://127.0.0.1:9", cwd=folder)
    assert result.returncode == 2
    (sentence,) = result.stderr.splitlines()
    assert sentence.startswith(f"error: {folder} holds 602 MiB to upload, and a cluster's job server takes 100; ")
    assert "largest: weights/ 600 MiB, notes.txt 2 MiB, text.txt 0 MiB; " in sentence
    (folder / ".rayignore").write_text("weights/\n")
    result = elastic_train("submit", "job.yaml", "--address", "http://127.0.0.1:9", cwd=folder)
    assert "no Ray job server at http://127.0.0.1:9" in result.stderr


def test_what_is_counted_is_what_ray_packs(tmp_path: Path) -> None:
    folder = tmp_path / "tree"
    for name in ("a.py", "sub/b.py", "sub/c.log", "runs/d", "sub/runs/e", ".git/f", "w.safetensors", "deep/er/g.bin"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "sub" / ".gitignore").write_text("*.log\n")
    package = tmp_path / "package.zip"
    create_package(str(folder), package, include_gitignore=True, excludes=EXCLUDES)
    with zipfile.ZipFile(package) as packed:
        inside = {Path(entry.filename): entry.file_size for entry in packed.infolist() if not entry.is_dir()}
    assert uploaded_files(folder, EXCLUDES) == inside
    assert {str(path) for path in inside} == {"a.py", "sub/b.py", "sub/.gitignore"}
    assert package.stat().st_size > sum(inside.values())  # not compressed


@pytest.mark.slow
@pytest.mark.cluster
def test_a_wrong_token_is_refused(jobs: Submitted) -> None:
    for words in (("submit", "job.yaml"), ("stop", "good"), ("logs", "good")):
        result = jobs.ask(*words, RAY_AUTH_TOKEN="0" * 64)
        assert result.returncode == 2
        assert len(result.stderr.splitlines()) == 1, result.stderr


@contextmanager
def other_ray(version: str) -> Iterator[str]:
    """A server that only says which Ray it is."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"version": "4", "ray_version": version, "ray_commit": "", "session_name": ""}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}"
        finally:
            listening.shutdown()
            thread.join()


def test_a_cluster_with_another_ray_is_refused(folder: Path) -> None:
    """RY-09: before anything is uploaded."""
    with other_ray("2.9.0") as address:
        result = elastic_train("submit", "job.yaml", "--address", address, cwd=folder)
    assert result.returncode == 2
    assert result.stderr == (
        f"error: the cluster at {address} runs Ray 2.9.0 and this is Ray {ray.__version__}; "
        "install the same version on both\n"
    )


def test_a_file_outside_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    result = elastic_train("submit", str(folder / "job.yaml"), cwd=tmp_path / "elsewhere")
    assert result.returncode == 2
    assert f"is outside {tmp_path / 'elsewhere'}, which is what the cluster gets" in result.stderr
