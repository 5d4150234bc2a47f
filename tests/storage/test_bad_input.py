"""Every way in which a server or its settings can be wrong: one sentence with the URI and the cause, in time."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest

from elastic_train.config.operation import StorageConfig
from elastic_train.storage.errors import StorageError, WrongSettings
from elastic_train.storage.store import Store
from tests.chaos_proxy import ChaosProxy, Message, answer, chaos
from tests.s3_server import S3Server

pytestmark = pytest.mark.slow

BUDGET, CONNECT = 1.0, 0.5
SLACK = 20.0
"""Seconds; the machine is shared."""
NOON = "Mon, 01 Jan 2024 12:00:00 GMT"
NO_BODY = Message("HTTP/1.1 403 Forbidden", {"content-length": "0", "date": NOON}, b"")
LISTING = b"<ListBucketResult><Contents><Key>x</Key><Size>7O</Size></Contents></ListBucketResult>"
NONSENSE = Message("HTTP/1.1 200 OK", {"content-length": str(len(LISTING))}, LISTING)


@dataclass(frozen=True)
class Case:
    """``broken`` makes it so and returns the endpoint; ``names`` is what the sentence must have in it."""

    name: str
    names: str
    broken: Callable[[ChaosProxy, pytest.MonkeyPatch], str]
    kind: type[StorageError] = StorageError
    bucket: str = ""
    call: Callable[[Store], object] = lambda store: store.read("x")


def answers(made: Message) -> Callable[[ChaosProxy, pytest.MonkeyPatch], str]:
    def broken(proxy: ChaosProxy, _: pytest.MonkeyPatch) -> str:
        proxy.always = made
        return proxy.endpoint_url

    return broken


def outage(kind: str) -> Callable[[ChaosProxy, pytest.MonkeyPatch], str]:
    def broken(proxy: ChaosProxy, _: pytest.MonkeyPatch) -> str:
        proxy.outage(kind)  # type: ignore[arg-type]
        return proxy.endpoint_url

    return broken


def variable(name: str, value: str) -> Callable[[ChaosProxy, pytest.MonkeyPatch], str]:
    def broken(proxy: ChaosProxy, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setenv(name, value)
        return proxy.endpoint_url

    return broken


def at(endpoint: str) -> Callable[[ChaosProxy, pytest.MonkeyPatch], str]:
    return lambda proxy, _: endpoint.format(port=proxy.port, server=proxy.server.endpoint_url.rpartition(":")[2])


def full_backlog(_: ChaosProxy, monkeypatch: pytest.MonkeyPatch) -> str:
    """A port whose queue is full, so that further connections get no answer, as from an address without a route."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    held: list[socket.socket] = [listener]
    with suppress(TimeoutError):
        while True:
            held.append(socket.create_connection(listener.getsockname(), timeout=0.3))
    monkeypatch.setattr(Case, "held", held, raising=False)
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


CASES = [
    Case("refused", r"could not be reached for \d+ seconds: .*127\.0\.0\.1", outage("refuse")),
    Case("silent", r"could not be reached for \d+ seconds: Read timeout", outage("silent")),
    Case("no answer to a connection", r"could not be reached for \d+ seconds: Connect timeout", full_backlog),
    Case("no such name", "the name of the server was not found .*no-such-host", at("http://no-such-host.invalid:9000")),
    Case("tls to a plain port", "no TLS connection; is the endpoint", at("https://127.0.0.1:{server}"), WrongSettings),
    Case("no such bucket", "the bucket does not exist; create it first", at("http://127.0.0.1:{port}"), WrongSettings,
         bucket="missing-4711"),
    Case("unknown key", "the server does not know this AWS_ACCESS_KEY_ID", variable("AWS_ACCESS_KEY_ID", "wrong"),
         WrongSettings),
    Case("wrong secret", "AWS_SECRET_ACCESS_KEY does not belong", variable("AWS_SECRET_ACCESS_KEY", "wrong"),
         WrongSettings),
    Case("denied", "access denied; the credentials in the environment may not",
         variable("AWS_ACCESS_KEY_ID", "test-access-reader"), call=lambda store: store.write("x", [b"1"])),
    Case("expired", "the credentials in the environment have expired", answers(answer(400, "ExpiredToken")),
         WrongSettings),
    Case("wrong region", "the bucket is in another region; set storage.region",
         answers(answer(400, "AuthorizationHeaderMalformed")), WrongSettings),
    Case("moved", "the bucket is in another region; set storage.region", answers(answer(301, "PermanentRedirect")),
         WrongSettings),
    Case("clock skew", r"this machine's clock says 2\d{3}-.* UTC, the server's 2024-01-01 12:00:00 UTC; at most 15 min",
         answers(answer(403, "RequestTimeTooSkewed", date=NOON)), WrongSettings),
    Case("clock skew in an answer without a body", "this machine's clock says .* 2024-01-01 12:00:00 UTC",
         answers(NO_BODY), WrongSettings, call=lambda store: store.size("x")),
    Case("server full", "the server is out of disk space", answers(answer(507, "InsufficientStorage")),
         call=lambda store: store.write("x", [b"1"])),
    Case("quota", "the storage quota is used up", answers(answer(403, "QuotaExceeded")),
         call=lambda store: store.create("x", b"1")),
    Case("busy", r"the server answered 503 \(Service Unavailable\) for \d+ seconds of retries",
         answers(answer(503, "SlowDown"))),
    Case("nonsense", r"the server's answers were damaged for \d+ seconds", answers(NONSENSE),
         call=lambda store: store.list()),
]  # fmt: skip


@pytest.fixture
def proxy(s3_environment: S3Server) -> Iterator[ChaosProxy]:
    with chaos(s3_environment) as running:
        yield running


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_sentence_in_time(proxy: ChaosProxy, s3_bucket: str, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    endpoint = case.broken(proxy, monkeypatch)
    uri = f"s3://{case.bucket or s3_bucket}/{secrets.token_hex(4)}"
    config = StorageConfig(endpoint_url=endpoint, retry_seconds=BUDGET, connect_timeout_seconds=CONNECT)
    started = time.monotonic()
    with pytest.raises(StorageError, match=rf"^{uri}(/x?)?: .*{case.names}") as caught:
        case.call(Store.open(uri, config))
    assert time.monotonic() - started < BUDGET + CONNECT + SLACK
    assert type(caught.value) is case.kind
    assert "\n" not in str(caught.value)


def test_a_full_server_is_not_asked_again(proxy: ChaosProxy, s3_bucket: str) -> None:
    store = Store.open(f"s3://{s3_bucket}/{secrets.token_hex(4)}", StorageConfig(endpoint_url=proxy.endpoint_url))
    assert not store.exists("x")
    proxy.requests.clear()
    proxy.always = answer(507, "InsufficientStorage")
    with pytest.raises(StorageError, match="out of disk space"):
        store.write("x", [b"1"])
    assert [method for method, _ in proxy.requests] == ["PUT"]


def test_a_server_that_names_a_pause_gets_it(proxy: ChaosProxy, s3_bucket: str) -> None:
    """A pause longer than the budget is not begun."""
    config = StorageConfig(endpoint_url=proxy.endpoint_url, retry_seconds=30.0)
    store = Store.open(f"s3://{s3_bucket}/{secrets.token_hex(4)}", config)
    assert not store.exists("x")
    proxy.requests.clear()
    proxy.always = answer(503, "SlowDown", **{"retry-after": "3600"})
    with pytest.raises(StorageError, match="SlowDown"):
        store.read("x")
    assert len(proxy.requests) == 1
    assert store.retries == {}
