"""Who has not the job's token gets nothing and disturbs nothing; the token itself is written nowhere."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_train.checkpoint.wire import send_frame
from elastic_train.controller.coordinator import Coordinator
from tests.jobs import assert_same_curve, make_job
from tests.local_job import LocalJob

pytestmark = pytest.mark.slow

Lines = list[dict[str, Any]]
Address = tuple[str, int]

TOKEN = "fW9kQm3xZr7TtNpLs2Vb"


class SecretJob(LocalJob):
    """With a token that occurs nowhere by chance."""

    token = TOKEN
    fresh = True  # what others see of a process is what it was started with


class Trap:
    """Its pickle would make a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._path,)


def join(**changes: Any) -> bytes:
    """What a host says first, without the token."""
    message = {
        "type": "join", "pid": 1, "node": "intruder", "address": "127.0.0.1", "bytes": ["127.0.0.1", 1],
        "pool": "/dev/shm/intruder", "images": [],
    }  # fmt: skip
    return json.dumps(message | changes).encode() + b"\n"


def frame(**message: Any) -> bytes:
    """A frame of the byte server's protocol."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_frame(ours, message)
        return theirs.recv(65536)


def knocks(trap: Path) -> dict[str, bytes]:
    """What strangers say, by name; each is said to every port."""
    return {
        "nothing": b"",
        "garbage": bytes(range(256)) * 50,
        "garbage line": b"\xff\xfe garbage\n",
        "half a line": b'{"type": "join", "tok',
        "huge line": b"x" * (4 * 2**20),
        "nesting": b"[" * 200_000 + b"\n",
        "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "pickle": pickle.dumps(Trap(trap)),
        "framed pickle": len(pickle.dumps(Trap(trap))).to_bytes(4, "big") + pickle.dumps(Trap(trap)),
        "join without token": join(),
        "join with a wrong token": join(token="wrong"),
        "join with a strange token": join(token="\ud800"),
        "join with a token of another type": join(token=[TOKEN]),
        "order without join": b'{"type": "uploaded", "object": "x"}\n',
        "hello with a wrong token": frame(op="hello", token="wrong"),
        "hello with a strange token": frame(op="hello", token="\ud800"),
        "read without hello": frame(op="read", image="g00000001-r00000-b0.img", step=1, byte_offset=0, nbytes=64),
        "huge frame": b"\xff\xff\xff\xff" + b"x" * 100_000,
        "nested frame": (4000).to_bytes(4, "big") + b"[" * 4000,
    }


def knock(address: Address, words: bytes) -> bytes:
    """All that a stranger is told who says ``words`` and then nothing more."""
    heard = b""
    with socket.create_connection(address, timeout=60) as sock:
        try:
            sock.sendall(words)
            sock.shutdown(socket.SHUT_WR)
            while data := sock.recv(65536):
                heard += data
        except TimeoutError:
            raise
        except OSError:
            pass  # closed while we were still talking
    return heard


def is_refusal(heard: bytes) -> bool:
    """Nothing at all, or the byte server's frame that says so."""
    return heard == b"" or json.loads(heard[4:]) == {"ok": False, "error": "wrong token"}


def ports(run: LocalJob) -> list[Address]:
    """The coordinator's and each host's byte server."""
    return [run.address, *(host.byte_address for host in run.coordinator.members.hosts.values())]


@contextmanager
def held(run: LocalJob) -> Iterator[None]:
    """The steps wait for a stopped trainer, or this small job would be over first; hosts and coordinator go on."""
    paused = run.trainer_pids()[0]
    os.kill(paused, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(paused, signal.SIGCONT)


def test_strangers_get_nothing_and_disturb_nothing(
    corpus: Path, reference: Lines, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trap = tmp_path / "unpickled"
    job = make_job(corpus, tmp_path / "runs", "guarded", "hosts.min=2", "hosts.max=2", "parallel.pp=2")
    with SecretJob(job) as run, ExitStack() as idle:
        for name, node in (("a0", "a"), ("b1", "b")):
            run.start_host(name, node)
        run.wait_step(3)
        with held(run):
            for address in ports(run):
                for _ in range(100):
                    idle.enter_context(socket.create_connection(address, timeout=60))
            for name, words in knocks(trap).items():
                for address in ports(run):
                    heard = knock(address, words)
                    assert is_refusal(heard), f"{name} at {address}: {heard[:200]!r}"
            assert len(run.status()["hosts"]) == 2
        assert run.finish()["state"] == "finished"
        assert_same_curve(run.lines("steps"), reference)
        ledger = run.lines("ledger")
    assert [event["cause"] for event in ledger if event["event"] == "generation_formed"] == ["start"]
    assert len([event for event in ledger if event["event"] == "host_joined"]) == 2
    assert not [event for event in ledger if event["event"] in ("host_lost", "trouble", "checkpoint_failed")]
    assert not trap.exists()
    assert "Traceback" not in capfd.readouterr().err


def closed_by_peer(sock: socket.socket, seconds: float) -> bool:
    readable, _, _ = select.select([sock], [], [], seconds)
    return bool(readable) and sock.recv(1) == b""


def test_the_coordinator_hangs_up_on_who_does_not_introduce_himself(corpus: Path, tmp_path: Path) -> None:
    with (
        SecretJob(make_job(corpus, tmp_path, "idle")) as run,
        socket.create_connection(run.address) as silent,
        socket.create_connection(run.address) as slow,
    ):
        slow.sendall(b'{"type": "join", "tok')
        assert closed_by_peer(silent, 60)
        assert closed_by_peer(slow, 60)


def test_a_stranger_cannot_fill_the_coordinators_memory(corpus: Path, tmp_path: Path) -> None:
    """64 MB without a newline, from someone without a token: the connection ends long before."""
    with SecretJob(make_job(corpus, tmp_path, "flood")) as run, socket.create_connection(run.address) as sock:
        sent = 0
        with pytest.raises(ConnectionError):
            while sent < 64 * 2**20:
                sent += sock.send(b"x" * 65536)
        assert sent < 32 * 2**20  # what the kernel's buffers take, and a little


def family() -> Iterator[psutil.Process]:
    yield psutil.Process()
    yield from psutil.Process().children(recursive=True)


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_the_token_is_in_no_file_no_command_line_and_no_log(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Looked for while the job runs and recovers from a lost host, and again when it is over."""
    job = make_job(corpus, tmp_path / "runs", "secret", "hosts.max=2", "parallel.pp=1", "log.samples=false")
    needle = TOKEN.encode()
    with SecretJob(job) as run, caplog.at_level("DEBUG"):
        for name, node in (("a0", "a"), ("b1", "b")):
            run.start_host(name, node)
        status = run.wait_step(12)
        with held(run):
            knock(run.address, join(token=TOKEN[:-1]))
            seen = [path for host in status["hosts"] for path in files_below(Path(host["pool"]))]
            assert any(path.suffix == ".img" for path in seen)
            assert not [path for path in seen if path.exists() and needle in path.read_bytes()]
            processes = list(family())
            assert any(process.name() == "et-trainer-0" for process in processes)
            for process in processes:
                assert TOKEN not in " ".join(process.cmdline())
                assert TOKEN not in " ".join(process.environ().values())
            run.kill_host("b1")
        assert run.finish()["state"] == "finished"
        assert needle not in json.dumps(run.events).encode()
        assert needle not in json.dumps(run.status()).encode()
    written = files_below(tmp_path)
    assert {"job.json", "ledger.jsonl", "steps.jsonl", "journal.jsonl"} <= {path.name for path in written}
    assert not [path for path in written if needle in path.read_bytes()]
    output = capfd.readouterr()
    assert TOKEN not in output.out + output.err + caplog.text


def test_a_host_with_a_wrong_token_is_sent_away(corpus: Path, tmp_path: Path) -> None:
    with SecretJob(make_job(corpus, tmp_path, "wrong", "hosts.max=1")) as run:
        run.token = "wrong"  # type: ignore[misc]
        host = run.start_host("a0", "a")
        assert host.wait(60) == 0
        assert host.stdout is not None
        assert host.stdout.read() == "the coordinator is gone\n"
        assert run.status()["hosts"] == []
        assert [event["event"] for event in run.events] == ["job_started"]


def test_errors_in_connections_are_handled(corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A stranger's words are a warning of one line, not an unhandled exception with a traceback."""
    with SecretJob(make_job(corpus, tmp_path, "handled")) as run:
        for words in knocks(tmp_path / "unpickled").values():
            knock(run.address, words)
        assert isinstance(run.coordinator, Coordinator)
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]
