from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from elastic_train.controller.local_cluster import LocalCluster, share_token
from tests.jobs import make_corpus, make_job
from tests.local_job import LocalJob
from tests.s3_server import S3Server, running_s3_server

settings.register_profile("no_deadline", deadline=None)  # a machine may be busy
settings.load_profile("no_deadline")
share_token()  # now: Ray remembers whether there was one when a test first used it


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A real S3 server for the whole test session, without buckets; tests make their own."""
    with running_s3_server() as server:
        yield server


@pytest.fixture(scope="session")
def s3_bucket(s3_server: S3Server) -> str:
    """A bucket that the tests share; each works below a prefix of its own."""
    return s3_server.create_bucket("shared")


@pytest.fixture
def s3_environment(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, with its credentials in the environment of the test."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[LocalCluster]:
    """A head with a job server, to be filled up with worker nodes by those who use it."""
    with LocalCluster(include_dashboard=True) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The lines of the job's uninterrupted run on one host."""
    job = make_job(corpus, tmp_path_factory.mktemp("reference"), "reference", "hosts.max=1")
    with LocalJob(job) as run:
        run.start_host("only", "node")
        assert run.finish()["state"] == "finished"
        return run.lines("steps")
