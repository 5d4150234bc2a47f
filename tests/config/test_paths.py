from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.config.load import parse_job
from elastic_train.config.paths import HOME_VARIABLE, anchored, home
from tests.config.job_files import GOOD


def test_relative_paths_become_absolute_and_uris_stay() -> None:
    job = anchored(parse_job(GOOD, ["data.uri=s3://bucket/data", "tracking.uri=sqlite:///db/ml.db"]), Path("/base"))
    assert job.storage.uri == "/base/runs"
    assert job.data.uri == "s3://bucket/data"
    assert job.tracking.uri == "sqlite:////base/db/ml.db"
    assert job.evaluation.uri is None
    assert job.init_from is None
    assert anchored(job, Path("/other")) == job
    for given, expected in (("models/qwen2", "/base/models/qwen2"), ("s3://bucket/qwen2", "s3://bucket/qwen2")):
        assert anchored(parse_job(GOOD, [f"init_from={given}"]), Path("/base")).init_from == expected


def test_the_evaluation_set_is_found_from_everywhere() -> None:
    job = anchored(parse_job(GOOD, ["evaluation.uri=runs/data/held"]), Path("/base"))
    assert job.evaluation.uri == "/base/runs/data/held"


def test_sources_are_found_from_everywhere() -> None:
    sources = "data.sources=[{name: a, uri: runs/a, weight: 1}, {name: b, uri: s3://b/b, weight: 1}]"
    job = anchored(parse_job(GOOD, ["data.uri=null", sources]), Path("/base"))
    assert [source.uri for source in job.data.all_sources] == ["/base/runs/a", "s3://b/b"]
    assert job.data.uri is None


def test_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(HOME_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    assert home() == tmp_path
    unpacked = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    unpacked.mkdir(parents=True)
    monkeypatch.chdir(unpacked)
    assert home() == Path.home() / "elastic_train"
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "here"))
    assert home() == tmp_path / "here"
