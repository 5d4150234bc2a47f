"""`elastic-train submit` on a real cluster: stopped, stopped while it waits, submitted again, two jobs at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.controller.local_cluster import LocalCluster
from tests.cli.submitted import LONG, Submitted, server
from tests.jobs import JOB
from tests.ray_job import processes, refill, until, until_none

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


@pytest.fixture
def cluster(ray_cluster: LocalCluster) -> LocalCluster:
    refill(ray_cluster, nodes=2, cpus=2)
    return ray_cluster


@pytest.fixture
def jobs(cluster: LocalCluster, corpus: Path, tmp_path: Path) -> Submitted:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "job.yaml").write_text(JOB.format(name="unnamed", data=corpus, storage=tmp_path / "runs"))
    return Submitted(cluster, folder)


def test_stopped_and_submitted_again(cluster: LocalCluster, jobs: Submitted, tmp_path: Path) -> None:
    sent = jobs.send("again", "hosts.max=2", "--grace", "90", *LONG)
    where = f"--address {server(cluster)}"
    told = dict(line.split(maxsplit=1) for line in sent.stdout.replace("job folder", "folder").splitlines())
    assert told["log:"] == f"elastic-train logs again {where} --follow"
    assert told["stop:"] == f"elastic-train stop again {where}"
    assert told["folder:"].startswith(f"{tmp_path}/runs/again ")
    assert told["MLflow:"] == "off (tracking.enabled)"
    jobs.wait_for_steps(["again"])
    shown = jobs.ask("status", "again")
    assert shown.stdout.startswith(f"again: RUNNING as {told['submission:']}\n"), shown.stdout + shown.stderr
    assert "again | running | step " in shown.stdout
    stopped = jobs.ask("stop", "again")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    last = jobs.lines("again", "steps")[-1]["step"]
    assert stopped.stdout.startswith(f"{told['submission:']}: SIGTERM for a last checkpoint; SIGKILL after 90 s")
    assert f"again: killed at step {last}; SIGTERM" in stopped.stdout
    assert stopped.stdout.endswith("again: STOPPED\n")
    assert (tmp_path / "runs" / "again" / "checkpoints" / f"step-{last:08d}-c1.json").is_file()
    until_none(lambda: processes(cluster))
    end = last + 2
    second = jobs.ask("submit", "job.yaml", "name=again", "hosts.max=1", f"training.steps={end}", "--wait")
    assert second.returncode == 0, second.stdout + second.stderr
    assert [event["step"] for event in jobs.events("again", "resumed")] == [last]
    assert [line["step"] for line in jobs.lines("again", "steps")] == list(range(1, end + 1))
    nothing = jobs.ask("stop", "again")
    assert (nothing.returncode, nothing.stderr) == (
        2,
        f"error: no job named again is running at {server(cluster)}; nothing is running there\n",
    )


def test_stopped_while_it_waits_for_machines(cluster: LocalCluster, jobs: Submitted) -> None:
    jobs.send("waiting", "hosts.cpus=1000", *LONG)
    until(lambda: jobs.events("waiting", "job_started"))
    stopped = jobs.ask("stop", "waiting")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert "waiting: killed at step 0; SIGTERM" in stopped.stdout
    assert not jobs.events("waiting", "host_joined")
    assert jobs.lines("waiting", "ledger")[-1]["event"] == "job_finished"
    until_none(lambda: processes(cluster))


def test_two_jobs_at_once(cluster: LocalCluster, jobs: Submitted) -> None:
    """Both would take all seats: each gets hosts of its own, and the next seats go to the one that has too few."""
    refill(cluster, nodes=1, cpus=2)
    wide = ("hosts.min=2", "hosts.max=4", "hosts.start_wait_seconds=0", *LONG)
    jobs.send("left", *wide)
    jobs.wait_for_steps(["left"])
    jobs.send("right", *wide)
    twice = jobs.ask("submit", "job.yaml", "name=left", "hosts.max=1")
    assert twice.returncode == 2
    assert twice.stderr.startswith("error: job 'left' is running on this cluster already, as left-20")
    assert f"stop it with `elastic-train stop left --address {server(cluster)}`" in twice.stderr
    wrong = jobs.ask("stop", "middle")
    assert wrong.stderr.endswith("; running there: left, right\n")
    until(lambda: jobs.events("left", "seats_left"), 120)
    cluster.add_nodes(1, cpus=1)  # not enough for the one, and not for the other any more
    assert not jobs.events("right", "host_joined")
    cluster.add_nodes(1, cpus=1)
    jobs.wait_for_steps(["right"])
    hosts = [{event["pid"] for event in jobs.events(name, "host_joined")} for name in ("left", "right")]
    assert [len(own) for own in hosts] == [2, 2]
    assert not hosts[0] & hosts[1]
    assert jobs.ask("stop", "left").returncode == 0
    until(lambda: len(jobs.events("right", "host_joined")) == 4, 120)
    assert [event["jobs"] for event in jobs.events("left", "seats_left")] == [["right"], []]
    assert jobs.ask("stop", "right").returncode == 0
    until_none(lambda: processes(cluster))
