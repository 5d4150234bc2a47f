from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_train.checkpoint.manifest import object_path
from elastic_train.storage.store import Store
from tests.cli.checkpoints import commit_checkpoint
from tests.cli.command import elastic_train
from tests.config.job_files import GOOD


@pytest.fixture
def job_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "job"
    for step in (999, 1000):
        commit_checkpoint(folder, step)
    return folder


def test_ls_is_in_numeric_order_and_shows_what_was_never_committed(job_folder: Path, tmp_path: Path) -> None:
    """CK-08, CK-03"""
    Store.open(str(job_folder)).write(object_path(1001, 2, 0), [b"half"])
    result = elastic_train("checkpoint", "ls", "job", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split()[1:3] for line in lines] == [
        ["999", "committed"],
        ["1000", "committed"],
        ["1001", "incomplete"],
    ]
    assert "dp_shard2  2 objects  64 bytes" in lines[0]


def test_show(job_folder: Path, tmp_path: Path) -> None:
    result = elastic_train("checkpoint", "show", "job", cwd=tmp_path)
    assert result.stdout.startswith("step 1000  cursor 8000  seed 1  generation 1\nlayout dp_shard2")
    assert "tensor param.model.norm.weight  float32  16  2 chunks" in result.stdout
    absent = elastic_train("checkpoint", "show", "job", "--step", "7", cwd=tmp_path)
    assert absent.returncode == 2
    assert "committed steps: 999, 1000" in absent.stderr


def test_verify(job_folder: Path, tmp_path: Path) -> None:
    result = elastic_train("checkpoint", "verify", "job", "--all", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "step 999: whole\nstep 1000: whole\n")


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_verify_names_the_damaged_object(job_folder: Path, tmp_path: Path, damage: str) -> None:
    """CK-06"""
    name = object_path(1000, 1, 1)
    file = job_folder / name
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[5] ^= 1
        file.write_bytes(data)
    elif damage == "truncate":
        file.write_bytes(data[:-1])
    else:
        file.unlink()
    result = elastic_train("checkpoint", "verify", "job", "--all", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (1, "step 999: whole\n")
    assert f"step 1000: damaged: object {name}" in result.stderr
    assert "Traceback" not in result.stderr


def test_verify_of_a_step_that_was_never_committed(job_folder: Path, tmp_path: Path) -> None:
    result = elastic_train("checkpoint", "verify", "job", "--step", "5", cwd=tmp_path)
    assert result.returncode == 2
    assert "step 5 has no committed checkpoint" in result.stderr


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    (tmp_path / "runs" / "job").mkdir(parents=True)
    assert "no checkpoint in" in elastic_train("checkpoint", "ls", "job", cwd=tmp_path).stdout
    result = elastic_train("checkpoint", "verify", "job", cwd=tmp_path)
    assert (result.returncode, "has no committed checkpoint" in result.stderr) == (2, True)


def test_a_job_file_says_where_its_folder_is(job_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(GOOD.replace("name: good", "name: job"))
    result = elastic_train("checkpoint", "ls", "job.yaml", cwd=tmp_path)
    assert len(result.stdout.splitlines()) == 2


def test_status_of_a_job_that_is_not_running(job_folder: Path, tmp_path: Path) -> None:
    step = {"step": 1000, "loss": 2.5, "generation": 1}
    (job_folder / "steps.jsonl").write_text(json.dumps(step) + '\n{"step": 1001, "lo')
    (job_folder / "ledger.jsonl").write_text(
        json.dumps({"time": 0.0, "event": "job_finished", "status": "failed"}) + "\n"
    )
    result = elastic_train("status", "job", cwd=tmp_path, RAY_ADDRESS="127.0.0.1:9")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("job: not running; last finished step 1000, loss 2.5, generation 1\n")
    assert "job finished  status=failed" in result.stdout
