from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_train.controller.local_cluster import LocalCluster
from tests.s3_server import S3Server, running_s3_server

RAY_FILES = {
    "cli/test_dry_run.py",
    "cli/test_quickstart.py",
    "cli/test_submission.py",
    "cli/test_submit.py",
    "cli/test_train.py",
    "controller/test_ray_contract.py",
    "controller/test_ray_job.py",
}
"""Tests that start Ray clusters, which mostly wait."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """For ``pytest -n 2 --dist loadgroup``: one worker has all clusters, the other the rest, file by file.

    So there is one cluster at a time.
    """
    item.add_marker(pytest.mark.xdist_group("ray" if _starts_ray(item) else item.path.as_posix()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Clusters first: they take longest."""
    items.sort(key=lambda item: not _starts_ray(item))


def _starts_ray(item: pytest.Item) -> bool:
    return item.path.relative_to(Path(__file__).parent).as_posix() in RAY_FILES


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
