from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tracking.mlflow_server import MlflowServer


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """One server for all tests: it takes seconds to start. Tests use experiments of their own."""
    server = MlflowServer(tmp_path_factory.mktemp("mlflow"))
    server.start()
    yield server
    server.kill()
