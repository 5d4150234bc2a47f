from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs import make_corpus, make_job
from tests.local_job import LocalJob


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
