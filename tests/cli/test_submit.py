"""What is in jobs/ on a running cluster, through Ray's own job commands, and a graceful stop of a submitted job."""

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


MODEL = (
    "model.hidden_size=32",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "model.intermediate_size=64",
    "model.vocab_size=304",
)
SMALL = (*MODEL, "data.sequence_length=32", "schedule.warmup_steps=0", "hosts.max=2", "tracking.enabled=false")
FINETUNING = ("finetune", "finetune_lora")
"""Files of jobs/configs, each of a job that begins with the model that quickstart.yaml trains."""


class Project:
    """A copy of jobs/ beside a folder ``runs``, and what its scripts are asked to do on a cluster."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.cluster, self.here, self.runs = cluster, folder / "project", folder / "project-runs"
        shutil.copytree(ROOT / "jobs", self.here / "jobs", ignore=shutil.ignore_patterns("__pycache__"))

    def script(self, name: str, config: str, *overrides: str) -> str:
        """What `ray job submit` of jobs/NAME.py has printed, once it has succeeded."""
        words = ("python", f"jobs/{name}.py", "--config", f"jobs/configs/{config}.yaml", *overrides)
        sent = ray_job(self.cluster, self.here, "submit", "--working-dir", ".", "--", *words)
        assert sent.returncode == 0, sent.stdout + sent.stderr
        return sent.stdout

    def submit(self, config: str, *overrides: str) -> list[str]:
        """Lines that `elastic-train submit --wait` has printed, once it has succeeded."""
        where = ("--address", server(self.cluster), "--wait")
        sent = elastic_train("submit", f"jobs/configs/{config}.yaml", *overrides, *where, cwd=self.here)
        assert sent.returncode == 0, sent.stdout + sent.stderr
        return sent.stdout.splitlines()

    def steps(self, job: str) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.runs / job / "steps.jsonl").read_text().splitlines()]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"{number}: to be or not to be, that is the question\n" * 10)
    return folder


@pytest.mark.timeout(600)
def test_from_texts_to_a_model_that_is_trained_further(cluster: LocalCluster, texts: Path, tmp_path: Path) -> None:
    """Every script and every file of jobs/, one after the other, as the pages tell it; only smaller."""
    project = Project(cluster, tmp_path)
    runs, data, model = project.runs, project.runs / "data" / "first", project.runs / "models" / "quickstart"
    places = (f"prepare_data.inputs=[{texts}]", f"prepare_data.output={data}", "prepare_data.vocab_size=280")
    assert "vocabulary: 280" in project.script("prepare_data", "prepare_data", *places)
    steps = ("training.steps=30", "optimizer.learning_rate=1e-2")
    sent = project.submit("quickstart", f"storage.uri={runs}", f"data.uri={data}", *steps, *SMALL)
    assert sent[0].startswith("submission: quickstart-")
    assert sent[-1] == f"{sent[0].split()[1]}: SUCCEEDED"
    losses = [line["loss"] for line in project.steps("quickstart")]
    assert len(losses) == 30
    project.submit("export", f"export_hf.storage={runs}", f"export_hf.out={model}")
    more = ("--input", str(texts), "--output", str(runs / "data" / "more"), "--tokenizer", str(model))
    assert elastic_train("data", "prepare", *more, cwd=tmp_path).returncode == 0
    for name in FINETUNING:
        trained = finetuned(project, name, f"init_from={model}", f"data.uri={runs}/data/more", f"evaluation.uri={data}")
        assert trained[0]["loss"] < (losses[0] + losses[-1]) / 2
        assert judged(project, f"{name}@2") == pytest.approx(
            {
                "step": 2,
                "samples": 5,
                "eval_loss": trained[1]["eval_loss"],
                "eval_loss_ema": trained[1]["eval_loss_ema"],
            },
            rel=1e-6,
        )
        assert trained[1]["eval_loss"] != trained[1]["eval_loss_ema"]


def finetuned(project: Project, name: str, *places: str) -> list[dict[str, float]]:
    """Lines of the four steps of the job in NAME.yaml."""
    often = ("training.steps=4", "checkpoint.every_steps=2", "evaluation.every_steps=2", "evaluation.samples=5")
    overrides = (f"storage.uri={project.runs}", *places, *often, *SMALL, "training.ema_decay=0.5")
    told = project.script("finetune", name, *overrides)
    assert " succeeded" in ray_job(project.cluster, project.here, "status", submission(told)).stdout
    steps = project.steps(name)
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert (project.runs / name / "checkpoints" / "step-00000004-c1.json").is_file()
    return steps


def judged(project: Project, checkpoint: str) -> dict[str, float]:
    """What `evaluate` finds, with the data of the job's own evaluation."""
    own = (f"evaluate.storage={project.runs}", "evaluate.data=null", "evaluate.samples=null", "evaluate.json=true")
    told = project.script("evaluate", "evaluate", f"evaluate.checkpoint={checkpoint}", *own)
    found: dict[str, float] = json.loads(told[told.index("{") : told.rindex("}") + 1])
    return {key: found[key] for key in ("step", "samples", "eval_loss", "eval_loss_ema")}


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
