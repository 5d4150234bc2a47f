from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cli.command import ROOT, elastic_train
from tests.config.job_files import GOOD


def dry_run(tmp_path: Path, *overrides: str) -> str:
    (tmp_path / "job.yaml").write_text(GOOD)
    result = elastic_train("train", "--config", "job.yaml", *overrides, "--dry-run", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def test_the_output_is_a_job_file_again(tmp_path: Path) -> None:
    first = dry_run(tmp_path, "training.steps=7", "parallel.tp=2", "hosts.min=2", "hosts.max=4")
    assert yaml.safe_load(first)["training"]["steps"] == 7
    (tmp_path / "again.yaml").write_text(first)
    again = elastic_train("validate", "again.yaml", cwd=tmp_path)
    assert again.stdout == first


def test_layouts_and_the_batch_equation(tmp_path: Path) -> None:
    text = dry_run(tmp_path, "parallel.pp=2", "hosts.min=2", "hosts.max=4")
    assert "# parameters: 180,800" in text
    assert "# tokens per step: global_batch 8 x sequence_length 32 = 256" in text
    assert "# on 4 hosts: layout pp2 x dp_shard2" in text
    assert "#   global_batch 8 = micro_batch 1 x accumulation 4 x data ranks 2" in text
    assert "# on 2 hosts: layout pp2" in text
    assert "#   global_batch 8 = micro_batch 1 x accumulation 8 x data ranks 1" in text


@pytest.mark.parametrize("axes", [("dp_shard=2", "tp=1"), ("dp_shard=1", "tp=2")])
def test_the_global_batch_does_not_depend_on_the_layout(tmp_path: Path, axes: tuple[str, str]) -> None:
    """CF-09"""
    text = dry_run(tmp_path, *(f"parallel.{axis}" for axis in axes), "hosts.min=2", "hosts.max=2")
    assert yaml.safe_load(text)["training"]["global_batch"] == 8
    assert "#   global_batch 8 = micro_batch 1 x accumulation" in text


def test_uneven_slots_are_said(tmp_path: Path) -> None:
    text = dry_run(tmp_path, "hosts.max=3")
    assert "8 slots, over data ranks 3 with accumulation 3: 1 of 9 micro-batches are padding" in text


@pytest.mark.parametrize("name", ["quickstart", "tiny"])
def test_the_job_files_of_the_repository_are_right(name: str) -> None:
    result = elastic_train("validate", f"jobs/configs/{name}.yaml", cwd=ROOT)
    assert result.returncode == 0, result.stderr


def test_the_quickstart_model_has_about_five_million_parameters() -> None:
    result = elastic_train("validate", "jobs/configs/quickstart.yaml", cwd=ROOT)
    assert "# parameters: 5,048,576" in result.stdout
    assert "# on 4 hosts: layout pp2 x dp_shard2" in result.stdout


def test_the_job_script_refuses_like_the_command(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(GOOD)
    result = subprocess.run(
        [sys.executable, str(ROOT / "jobs/pretrain.py"), "--config", "job.yaml", "training.steps=0"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert result.stderr == "error: training.steps=0: must be an integer of at least 1\n"
