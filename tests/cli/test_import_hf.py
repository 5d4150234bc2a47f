from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from elastic_train.config.load import parse_job
from tests.cli.command import elastic_train
from tests.model.test_hf_folder import CONFIG, TENSORS, write

pytestmark = pytest.mark.slow

JOB = """
name: mine
data: {uri: nowhere, sequence_length: 8}
training: {steps: 1, global_batch: 2}
storage: {uri: runs}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "model")


def test_the_printed_section_makes_a_job_that_starts_from_the_folder(folder: Path, tmp_path: Path) -> None:
    result = elastic_train("import-hf", "model", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    nbytes = sum(tensor.nbytes for tensor in TENSORS.values())
    first = f"# {nbytes // 4:,} parameters in 21 tensors (21 F32), {nbytes:,} bytes in 1 file\n"
    assert result.stdout.startswith(first)
    job = parse_job(JOB + result.stdout)
    assert job.init_from == str(folder)
    assert (job.model.hidden_size, job.model.rope_theta, job.model.max_position_embeddings) == (16, 5e5, 2048)
    (tmp_path / "job.yaml").write_text(JOB + result.stdout)
    validated = elastic_train("validate", "job.yaml", cwd=tmp_path)
    assert validated.returncode == 0, validated.stderr


def test_the_section_goes_to_a_new_file(folder: Path, tmp_path: Path) -> None:
    for expected in (0, 2):
        result = elastic_train("import-hf", "model", "--out", "model.yaml", cwd=tmp_path)
        assert result.returncode == expected
    assert result.stderr == "error: model.yaml exists; give another file\n"
    assert yaml.safe_load((tmp_path / "model.yaml").read_text())["init_from"] == str(folder)


def test_every_problem_of_a_folder_is_a_line(folder: Path, tmp_path: Path) -> None:
    write(folder, {name: tensor for name, tensor in TENSORS.items() if name != "model.norm.weight"})
    config = CONFIG | {"hidden_act": "gelu", "rope_scaling": {"type": "linear", "factor": 2.0}}
    (folder / "config.json").write_text(json.dumps(config))
    result = elastic_train("import-hf", "model", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        f"error: {folder}: config.json: hidden_act='gelu': only 'silu' is available",
        f"error: {folder}: config.json: rope scaling linear: only llama3 and no scaling (default) are available",
    ]
    (folder / "config.json").write_text(json.dumps(CONFIG))
    result = elastic_train("import-hf", "model", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (2, f"error: {folder}: missing tensors: model.norm.weight\n")


@pytest.mark.parametrize("verb", [["validate"], ["train", "--dry-run"], ["train"]])
def test_a_job_of_another_model_is_refused_before_anything_starts(
    verb: list[str], folder: Path, tmp_path: Path
) -> None:
    section = elastic_train("import-hf", "model", cwd=tmp_path).stdout
    (tmp_path / "job.yaml").write_text(JOB + section)
    overrides = ["model.vocab_size=64", "model.qkv_bias=true"]
    result = elastic_train(verb[0], "job.yaml", *overrides, *verb[1:], cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "error: model.vocab_size=64: the config.json of init_from has 30",
        "error: model.qkv_bias=True: the config.json of init_from has False",
    ]
