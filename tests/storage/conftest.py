from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_train.config.operation import StorageConfig
from elastic_train.storage.store import Store


def _s3_store(request: pytest.FixtureRequest) -> Store:
    server = request.getfixturevalue("s3_environment")
    bucket = request.getfixturevalue("s3_bucket")
    config = StorageConfig(endpoint_url=server.endpoint_url, retry_seconds=5.0)
    return Store.open(f"s3://{bucket}/{secrets.token_hex(4)}/job with space+plus", config)


def _local_store(request: pytest.FixtureRequest) -> Store:
    folder: Path = request.getfixturevalue("tmp_path")
    return Store.open(str(folder / "job with space+plus"))


STORES: dict[str, Callable[[pytest.FixtureRequest], Store]] = {"local": _local_store, "s3": _s3_store}


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] if name == "s3" else []) for name in STORES])
def store(request: pytest.FixtureRequest) -> Store:
    """A new, empty store of each kind; its prefix holds a space and a plus."""
    return STORES[request.param](request)


@pytest.fixture
def s3_store(request: pytest.FixtureRequest) -> Store:
    return _s3_store(request)


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 1 MiB."""
    import os
    import subprocess

    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
