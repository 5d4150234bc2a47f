from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from elastic_train.config.job import Job
from elastic_train.data.batches import StepBatches
from elastic_train.data.corpus import open_corpus
from elastic_train.data.dataset import TokenDataset
from elastic_train.data.order import SampleOrder
from elastic_train.data.prepare import prepare
from elastic_train.model.hf_folder import open_hf_folder
from tests.hf_models import hf_loss, load_hf, save_hf
from tests.training.synthetic import small_job

ROOT = Path(__file__).parents[2]
BLOCK_IMPORTS = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ray", "mlflow"):
            raise ImportError(f"{name} is blocked in this test")

sys.meta_path.insert(0, Blocked())
"""


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of four steps on a small data set."""
    folder = tmp_path_factory.mktemp("main")
    texts = folder / "texts"
    texts.mkdir()
    for number in range(40):
        words = " ".join(f"word{number * index % 97}" for index in range(200))
        (texts / f"{number}.txt").write_text(words)
    prepare(open_corpus(str(texts)), str(folder / "data"), 300)
    job = small_job(
        model={"vocab_size": 300},
        data={"uri": str(folder / "data")},
        training={"steps": 4, "ema_decay": 0.9},
        evaluation={"uri": str(folder / "data"), "every_steps": 3, "samples": 7},
        schedule={"warmup_steps": 2},
    )
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job.as_dict()))
    (folder / "sitecustomize.py").write_text(BLOCK_IMPORTS)
    return path


def torchrun(ranks: int, job_file: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=f"{job_file.parent}:{ROOT}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "elastic_train.training", str(job_file), *overrides]
    return subprocess.run(command, env=environment, cwd=job_file.parent, capture_output=True, text=True, timeout=200)


def metrics(result: subprocess.CompletedProcess[str]) -> list[dict[str, float]]:
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.slow
def test_runs_under_torchrun_without_ray_and_mlflow(job_file: Path) -> None:
    alone, parallel = (metrics(torchrun(ranks, job_file)) for ranks in (1, 3))
    assert [line["step"] for line in alone] == [1, 2, 3, 4]
    assert alone[0]["valid_tokens"] == 8 * 32
    for key in ("loss", "grad_norm", "lr"):
        assert [line[key] for line in parallel] == pytest.approx([line[key] for line in alone], rel=1e-5)
    assert [line["step"] for line in alone if "eval_loss" in line] == [3, 4]
    for key in ("eval_loss", "eval_loss_ema"):
        assert parallel[3][key] == pytest.approx(alone[3][key], rel=1e-5)
        assert parallel[3]["eval_seconds"] > 0 and "eval_seconds" not in parallel[1]


@pytest.mark.slow
def test_errors_of_the_user_are_one_line(job_file: Path) -> None:
    result = torchrun(1, job_file, "model.vocab_size=100")
    assert result.returncode != 0
    assert "model.vocab_size=100: must be at least 300" in result.stderr


@pytest.mark.slow
def test_starts_from_a_hugging_face_folder(job_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source = save_hf(tmp_path / "source", "Qwen2", vocab_size=300)
    model = open_hf_folder(str(source)).model
    job = Job.model_validate(yaml.safe_load(job_file.read_text()), strict=False)
    job = job.model_copy(update={"init_from": str(source), "model": model})
    path = job_file.parent / "imported.yaml"
    path.write_text(yaml.safe_dump(job.as_dict()))
    dataset = TokenDataset.open(job.data.uri, job.data.sequence_length)
    batches = StepBatches(dataset, SampleOrder(len(dataset), job.seed), job.training)
    expected = hf_loss(load_hf(source), [batches.slot(1, index) for index in range(job.training.slots)])
    assert metrics(torchrun(2, path))[0]["loss"] == pytest.approx(expected, rel=1e-5)
    refused = torchrun(1, path, "model.vocab_size=301")
    assert refused.returncode != 0
    assert "model.vocab_size=301: the config.json of init_from has 300" in refused.stderr
