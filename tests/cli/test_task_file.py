"""Task files and what is in jobs/: checked before anything is sent, and done by `run` as by the verb itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_train.cli.task_file import VERBS, read_task
from elastic_train.config.errors import ConfigError
from elastic_train.config.load import load_job
from tests.cli.command import ROOT, elastic_train
from tests.config.job_files import GOOD
from tests.upgrades.test_upgrades import NEWEST, copied

CONFIGS = sorted((ROOT / "jobs" / "configs").glob("*.yaml"))


def write(path: Path, **content: Any) -> str:
    path.write_text(yaml.safe_dump(content))
    return path.name


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_file_in_jobs_is_a_job_or_a_task(config: Path) -> None:
    task = read_task(str(config), [])
    if task is None:
        load_job(config)
    else:
        assert task.section in VERBS


def test_what_is_wrong_with_a_task_is_told_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "task.yaml", name="a b", evaluate=[1], needs={"cpus": -1}, other=1)
    with pytest.raises(ConfigError) as refused:
        read_task(str(tmp_path / path), [])
    assert [problem.removeprefix(f"{tmp_path}/task.yaml: ") for problem in refused.value.problems] == [
        "name='a b': use 1 to 63 letters, digits, '.', '_' or '-', starting with a letter or digit",
        "other: is no field of a task file; it has name, needs and evaluate",
        "evaluate=[1]: must be a mapping of the verb's options",
        "needs.cpus=-1: must be a number of at least 0",
    ]


@pytest.mark.parametrize(
    ("section", "options", "sentence"),
    [
        ("evaluate", {"chekpoint": "a"}, "evaluate.chekpoint: must be one of checkpoint, data, samples, storage, "),
        ("evaluate", {"data": "a"}, "evaluate: Missing argument"),
        ("evaluate", {"checkpoint": "a", "samples": 0}, "evaluate: Invalid value for '--samples': "),
        ("prepare_data", {"format": "pdf"}, "prepare_data: Invalid value for '--format': "),
    ],
)
@pytest.mark.parametrize("verb", ["run", "submit"])
def test_an_option_that_there_is_not_is_refused_before_anything_is_sent(
    verb: str, section: str, options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    write(tmp_path / "task.yaml", name="wrong", **{section: options})
    result = elastic_train(verb, "task.yaml", "--address", "http://127.0.0.1:9", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: task.yaml: {sentence}"), result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_job_file_is_no_task(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(GOOD)
    assert read_task(str(tmp_path / "job.yaml"), []) is None
    assert read_task(str(tmp_path / "absent.yaml"), []) is None  # the reader of job files says so


def test_evaluate_without_data_or_job(tmp_path: Path) -> None:
    folder = copied(NEWEST, tmp_path)
    nothing = elastic_train("evaluate", str(folder / "jobs" / "old"), cwd=tmp_path)
    assert (nothing.returncode, nothing.stderr) == (2, "error: old has no evaluation.uri; give --data\n")
    many = elastic_train("evaluate", str(folder / "jobs" / "old@9"), cwd=tmp_path)
    assert many.returncode == 2
    assert "step 9 has no committed checkpoint" in many.stderr
