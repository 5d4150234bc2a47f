"""A real ``mlflow server`` on a free port: one worker, SQLite, in a folder of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

START_SECONDS = 120.0


class MlflowServer:
    """Can be stopped, frozen and started again on the same port with the same database.

    ``prefix`` goes before its command where ``address`` is not in this process's network.
    """

    def __init__(self, folder: Path, address: str = "127.0.0.1", prefix: Sequence[str] = ()) -> None:
        self.folder, self._address, self._prefix = folder, address, prefix
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.uri = f"http://{address}:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start and wait until it answers."""
        command = [*self._prefix, sys.executable, "-m", "mlflow", "server"]
        command += ["--host", self._address, "--port", str(self.port), "--allowed-hosts", f"{self._address}:*"]
        command += ["--backend-store-uri", f"sqlite:///{self.folder / 'server.db'}", "--workers", "1"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.folder / "server.log").read_text())
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=2) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)  # its own session: the server and its worker

    def freeze(self) -> None:
        """Connections are accepted by the kernel, and nobody answers."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """As if the machine went away."""
        if self._process is not None and self._process.poll() is None:
            self._signal(signal.SIGCONT)
            self._signal(signal.SIGKILL)
            self._process.wait()
