"""`elastic-train train` as a process of its own: signals, exit codes, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_train.controller.local_cluster import LocalCluster, free_port
from tests.cli.command import ROOT, elastic_train
from tests.jobs import JOB
from tests.ray_job import refill, until, until_none
from tests.recovered import assert_recovered

pytestmark = pytest.mark.cluster

LONG = ("training.steps=1000000", "checkpoint.every_steps=1000000")
MARK = "ELASTIC_TRAIN_TEST"


Lines = list[dict[str, Any]]


def logs(job_folder: Path, name: str) -> Lines:
    """Lines of ``steps`` or ``ledger``; none while there is no such file."""
    path = job_folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Train:
    """A running `elastic-train train`, and everything that it has started."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.runs = folder / "runs"
        self.job_folder = self.runs / name
        self._mark = uuid.uuid4().hex
        self.scratch = folder / "tmp"
        self.scratch.mkdir()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), MARK: self._mark, "TMPDIR": str(self.scratch)}
        environment.setdefault("RAY_TMPDIR", "/tmp")  # the paths of Ray's sockets must be short
        environment.pop("RAY_ADDRESS", None)
        self.output = (folder / "output.txt").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "elastic_train.cli.main", "train", "--config", "job.yaml", *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def lines(self, name: str) -> Lines:
        return logs(self.job_folder, name)

    def events(self) -> list[object]:
        return [line["event"] for line in self.lines("ledger")]

    def family(self) -> list[str]:
        """Every living process that has our mark in its environment, the command itself included."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self._mark:
                    found.append(" ".join(process.cmdline())[:200])
            except psutil.Error:
                continue
        return found

    def text(self) -> str:
        self.output.seek(0)
        return self.output.read()

    def wait_for(self, condition: str, count: int = 1) -> None:
        """Until ``count`` steps are finished, or the ledger has the event ``condition``."""

        def seen() -> bool:
            assert self.process.poll() is None, self.text()
            return len(self.lines("steps")) >= count if condition == "steps" else condition in self.events()

        until(seen, 120)

    def end(self) -> int:
        code = self.process.wait(120)
        until_none(self.family)
        return code


@contextmanager
def training(folder: Path, name: str, *arguments: str) -> Iterator[Train]:
    train = Train(folder, name, *arguments)
    try:
        yield train
    finally:
        if train.process.poll() is None:
            train.process.kill()  # its raylets end with it
        train.process.wait()
        train.output.close()


@pytest.fixture
def folder(corpus: Path, tmp_path: Path) -> Path:
    """A folder to run in: ``job.yaml``; job folders go to ``runs``."""
    (tmp_path / "job.yaml").write_text(JOB.format(name="unnamed", data=corpus, storage="runs"))
    return tmp_path


def mlflow_status(runs: Path) -> set[str]:
    """Statuses of all MLflow runs of the job."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{runs / 'mlflow.db'}")
    found = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert len(found) == 2  # the job's and its only generation's
    return {run.info.status for run in found}


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_stopped_by_a_signal(folder: Path, number: signal.Signals, code: int) -> None:
    name = f"cli-{number.name.lower()}"
    with training(folder, name, f"name={name}", "hosts.max=2", "tracking.enabled=true", *LONG) as train:
        train.wait_for("steps", 5)
        if number == signal.SIGINT:
            os.killpg(train.process.pid, number)  # as a terminal does
        else:
            train.process.send_signal(number)
        assert train.end() == code, train.text()
        last = train.lines("steps")[-1]["step"]
        assert (train.job_folder / "checkpoints" / f"step-{last:08d}-c1.json").is_file()
        ended = train.lines("ledger")[-1]
        assert (ended["event"], ended["status"], ended["step"]) == ("job_finished", "killed", last)
        assert mlflow_status(train.runs) == {"KILLED"}
        assert f"{name}: killed at step {last}; {number.name}" in train.text()
        assert "Traceback" not in train.text()
    assert not list(Path("/dev/shm").glob(f"elastic_train-{name}-*"))
    assert not list(train.scratch.glob("elastic_train-*"))


@pytest.mark.slow
def test_terminated_while_ray_starts(folder: Path) -> None:
    with training(folder, "cli-early", "name=cli-early", "hosts.max=1", *LONG) as train:
        until(lambda: any("gcs_server" in line for line in train.family()))
        train.process.send_signal(signal.SIGTERM)
        assert train.end() == 143, train.text()
        assert "Traceback" not in train.text()


@pytest.mark.slow
def test_stopped_while_it_waits_for_machines(folder: Path, ray_cluster: LocalCluster) -> None:
    where = ("--address", ray_cluster.address)
    with training(folder, "cli-waiting", *where, "name=cli-waiting", "hosts.cpus=1000", *LONG) as train:
        train.wait_for("job_started")
        train.process.send_signal(signal.SIGTERM)
        assert train.end() == 143, train.text()
        assert train.events()[-1] == "job_finished"
        assert "host_joined" not in train.events()
        assert "Traceback" not in train.text()


@pytest.mark.slow
def test_failing_job(folder: Path) -> None:
    wrong = ("optimizer.learning_rate=1e30", "optimizer.weight_decay=0", "schedule.warmup_steps=0")
    with training(folder, "cli-failing", "name=cli-failing", "hosts.max=1", *wrong) as train:
        assert train.end() == 1
        assert "failure.max_bad_steps=3" in train.text()
        assert "cli-failing: failed at step " in train.text()


@pytest.mark.slow
def test_dead_tracking_server_stops_no_step(folder: Path, ray_cluster: LocalCluster, reference: Lines) -> None:
    """ML-03: nobody listens at the tracking URI; the job finishes all the same, has its curve and says what is lost."""
    refill(ray_cluster, nodes=2, cpus=2)
    tracking = ("tracking.enabled=true", f"tracking.uri=http://127.0.0.1:{free_port('127.0.0.1')}")
    words = ("train", "job.yaml", "name=cli-mute", "hosts.max=1", *tracking, "--address", ray_cluster.address)
    done = elastic_train(*words, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_recovered(partial(logs, folder / "runs" / "cli-mute"), reference, ["start"])
    assert "warning: 30 steps are not in MLflow" in done.stderr


@pytest.mark.slow
def test_finished_job_again_and_another_job_of_its_name(folder: Path, ray_cluster: LocalCluster) -> None:
    refill(ray_cluster, nodes=2, cpus=2)
    words = ("train", "job.yaml", "name=cli-again", "training.steps=5", "hosts.max=1", "--address", ray_cluster.address)
    first = elastic_train(*words, cwd=folder)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "cli-again: finished at step 5" in first.stdout
    again = elastic_train(*words, cwd=folder)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "step 5 was already reached" in again.stdout
    other = elastic_train(*words, "seed=2", cwd=folder)
    assert other.returncode == 2
    assert other.stderr.startswith("error: job 'cli-again' exists in ")
    assert "seed=2 (there: 1)" in other.stderr
    assert len(other.stderr.splitlines()) == 1
    assert len((folder / "runs" / "cli-again" / "steps.jsonl").read_text().splitlines()) == 5


def test_no_data_set(folder: Path) -> None:
    result = elastic_train("train", "job.yaml", "data.uri=absent", cwd=folder)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert "absent has no manifest.json" in result.stderr
    assert "Traceback" not in result.stderr
