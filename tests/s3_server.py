"""A real S3 server (SeaweedFS) on ports and a folder of its own, for tests."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_train.cli.services.ports import PortPicker
from elastic_train.cli.services.servers import find_weed, weed_command

START_SECONDS = 60.0
_PORTS = PortPicker()


@dataclass(frozen=True)
class S3Server:
    """Where a running server listens and who may use it."""

    endpoint_url: str
    access_key: str
    secret_key: str
    pid: int

    @property
    def environment(self) -> dict[str, str]:
        """Credentials as the variables that S3 clients read."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> Any:
        """A boto3 client with the server's credentials."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
            config=Config(s3={"addressing_style": "path"}, proxies={}),
        )

    def create_bucket(self, name: str) -> str:
        """Creates a bucket (the package never does) and returns its name. Each takes 7 of the server's 500 volumes."""
        self.client().create_bucket(Bucket=name)
        return name


def free_ports(count: int) -> list[int]:
    """``count`` free ports whose ports + 10000 are free too: SeaweedFS opens both of each."""
    return list(_PORTS.pick("", (), count, pairs=True))


def _identity(name: str, access_key: str, secret_key: str, *actions: str) -> dict[str, Any]:
    return {"name": name, "credentials": [{"accessKey": access_key, "secretKey": secret_key}], "actions": list(actions)}


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with opener.open(f"{url}/healthz", timeout=2):
                return
        except (OSError, http.client.HTTPException):  # nobody listens, or a connection came back to itself
            time.sleep(0.1)
    raise RuntimeError(f"the S3 server did not start:\n{log.read_text(errors='replace')[-2000:]}")


@contextmanager
def running_s3_server(
    access_key: str = "test-access",
    secret_key: str = "test-secret-Zu9vQ",
    memory: str = "400MiB",
    address: str = "127.0.0.1",
    prefix: Sequence[str] = (),
) -> Iterator[S3Server]:
    """Starts a server in a temporary folder; it is killed and its folder removed at the end.

    The access key with ``-reader`` after it, and the same secret, may only read. Above ``memory`` the server collects
    garbage all the time, which makes it slow, not wrong. It listens on ``address``, where ``prefix`` goes before its
    command to get there.
    """
    with tempfile.TemporaryDirectory(prefix="s3-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        identities = [
            _identity("owner", access_key, secret_key, "Admin", "Read", "Write", "List", "Tagging"),
            _identity("reader", f"{access_key}-reader", secret_key, "Read", "List"),
        ]
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))
        ports = free_ports(4)
        url = f"http://{address}:{ports[0]}"
        log = folder / "server.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*prefix, *weed_command(find_weed(None), folder, folder / "s3.json", *ports, host=address)],
                stdout=output,
                stderr=output,
                env={**os.environ, "GOMEMLIMIT": memory},
            )
        try:
            _wait_ready(url, process, log)
            yield S3Server(url, access_key, secret_key, process.pid)
        finally:
            process.send_signal(signal.SIGKILL)  # SIGTERM takes it half a minute
            process.wait()
