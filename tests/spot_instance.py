"""The metadata service of a spot machine of AWS or Google Cloud, as far as notices of its end go."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Metadata(ThreadingHTTPServer):
    """The service of one instance. Tokens are worth ``uses`` requests."""

    daemon_threads = True

    def __init__(self, address: str) -> None:
        super().__init__((address, 0), _Handler)
        self.answer: tuple[int, bytes] = (404, b"<html>not found</html>")
        self.token_status, self.uses, self.stalls = 200, 1000, threading.Event()
        self.tokens: dict[str, int] = {}
        self.asked = 0
        self.stalls.set()

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Metadata

    def do_PUT(self) -> None:
        known = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"] == "21600"
        token = f"token-{len(self.server.tokens)}"
        self.server.tokens[token] = self.server.uses
        self._answer(self.server.token_status if known else 400, token.encode())

    def do_GET(self) -> None:
        self.server.asked += 1
        self.server.stalls.wait(30)
        if self.path == "/computeMetadata/v1/instance/preempted" and self.headers["Metadata-Flavor"] == "Google":
            self._answer(*self.server.answer)
            return
        token = self.headers["X-aws-ec2-metadata-token"]
        if self.server.tokens.get(token, 0) < 1:
            self._answer(401, b"")
        elif self.path != "/latest/meta-data/spot/instance-action":
            self._answer(400, b"")
        else:
            self.server.tokens[token] -= 1
            self._answer(*self.server.answer)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def running_metadata(address: str = "127.0.0.1") -> Iterator[Metadata]:
    """The service in a thread."""
    with Metadata(address) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.stalls.set()
            server.shutdown()
            thread.join()


def notice_in(seconds: float) -> bytes:
    """The body that says that the instance ends then."""
    end = datetime.fromtimestamp(time.time() + seconds, UTC)
    return json.dumps({"action": "terminate", "time": f"{end:%Y-%m-%dT%H:%M:%SZ}"}).encode()
