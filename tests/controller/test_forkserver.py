from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_train.controller.forkserver_client import ForkServerClient, TrainerProcess
from elastic_train.controller.wire import Message
from tests.controller.processes import await_exit, program
from tests.jobs import make_job
from tests.local_job import LocalJob


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """A rendezvous that never answers: trainers sent there stay alive until somebody ends them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[:2]


def assignment(folder: Path, store: tuple[str, int], rank: int = 0, **changes: Any) -> Message:
    """For a trainer of a job of two ranks."""
    return {
        "type": "assign",
        "generation": 1,
        "rank": rank,
        "layout": {"pp": 2, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1},
        "store": list(store),
        "start_step": 0,
        "restore": {"step": 0, "images": [], "memory": False, "whole": False, "checkpoint": None},
        "history": {"losses": [], "norms": []},
        "no_retry": [],
        "outage_seconds": 0.0,
        "job": make_job(folder / "no data", folder, "job").as_dict(),
        "control": str(folder / f"control-{rank}"),
        "pool": str(folder),
        "token": "token",
        "job_folder": str(folder / "job"),
    } | changes


class Watched:
    """A client and everything it has told; ``until`` waits for its next word."""

    def __init__(self) -> None:
        self.client = ForkServerClient(threads=1)
        self.messages: list[tuple[TrainerProcess, Message]] = []
        self.ends: list[tuple[TrainerProcess, int | None]] = []
        self._news = asyncio.Event()

    async def start(self) -> None:
        await self.client.start(self._on_message, self._on_end)

    def _on_message(self, trainer: TrainerProcess, message: Message) -> None:
        self.messages.append((trainer, message))
        self._news.set()

    def _on_end(self, trainer: TrainerProcess, code: int | None) -> None:
        self.ends.append((trainer, code))
        self._news.set()

    async def until(self, condition: Any) -> None:
        while not condition():
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), 120)


def forkserver_of(client: ForkServerClient) -> psutil.Process:
    return psutil.Process(client._process.pid)


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_trainers_are_forked_their_ends_are_told_and_close_leaves_none(tmp_path: Path, silent: tuple[str, int]) -> None:
    async def run() -> None:
        watched = Watched()
        await watched.start()
        early = watched.client.fork(1, 0, assignment(tmp_path, silent))  # asked for before the imports are done
        assert await watched.client.wait_ready() > 0
        late = watched.client.fork(1, 1, assignment(tmp_path, silent, rank=1))
        await watched.until(lambda: early.pid and late.pid)
        server = forkserver_of(watched.client)
        assert server.name() == "et-forkserver"
        assert {child.pid for child in server.children()} == {early.pid, late.pid}
        assert [(t.rank, m["type"], m["pid"]) for t, m in watched.messages] == [
            (0, "forked", early.pid), (1, "forked", late.pid)
        ]  # fmt: skip

        assert early.pid and late.pid
        os.kill(early.pid, signal.SIGKILL)
        await watched.until(lambda: watched.ends)
        assert watched.ends == [(early, -signal.SIGKILL)]
        await_exit(early.pid)

        watched.client.close()
        await_exit(late.pid)
        await_exit(server.pid)
        early.control.close()
        late.control.close()

    asyncio.run(run())


def test_kill_ends_a_trainer_even_one_whose_pid_is_not_known_yet(tmp_path: Path, silent: tuple[str, int]) -> None:
    async def run() -> None:
        watched = Watched()
        await watched.start()
        unborn = watched.client.fork(1, 0, assignment(tmp_path, silent))
        assert unborn.pid is None
        unborn.kill()
        await watched.until(lambda: len(watched.ends) == 1)
        next_one = watched.client.fork(2, 0, assignment(tmp_path, silent, generation=2))
        await watched.until(lambda: next_one.pid)
        next_one.kill()
        next_one.kill()  # twice does no harm
        await watched.until(lambda: len(watched.ends) == 2)
        assert watched.ends == [(unborn, -signal.SIGKILL), (next_one, -signal.SIGKILL)]
        watched.client.close()

    asyncio.run(run())


def test_a_trainers_error_arrives_before_its_end_with_the_traceback(tmp_path: Path) -> None:
    """Its rendezvous is a closed port: the trainer fails by itself."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()[:2]
    broken = assignment(tmp_path, address)
    broken["layout"] = {"pp": 2, "no_such_axis": 1}

    async def run() -> None:
        watched = Watched()
        await watched.start()
        trainer = watched.client.fork(1, 0, broken)
        await watched.until(lambda: watched.ends)
        assert watched.ends == [(trainer, 1)]
        (error,) = [message for _, message in watched.messages if message["type"] == "error"]
        assert error["kind"] == "exception"
        assert "no_such_axis" in error["error"]
        assert "Traceback" in error["traceback"]
        assert error["step"] == 1
        watched.client.close()

    asyncio.run(run())


def test_many_trainers_leave_no_descriptor_and_no_zombie_behind(tmp_path: Path, silent: tuple[str, int]) -> None:
    async def run() -> None:
        watched = Watched()
        await watched.start()
        await watched.client.wait_ready()
        server = forkserver_of(watched.client)
        counts = []
        for number in range(1, 9):
            trainer = watched.client.fork(number, 0, assignment(tmp_path, silent, generation=number))
            await watched.until(lambda trainer=trainer: trainer.pid)
            trainer.kill()
            await watched.until(lambda number=number: len(watched.ends) == number)
            trainer.control.close(unlink=True)
            await asyncio.sleep(0)
            counts.append((open_files(server.pid), open_files(os.getpid())))
        (server_then, ours_then), (server_now, ours_now) = counts[1], counts[-1]
        assert server_now == server_then
        assert ours_now <= ours_then  # fewer when what earlier tests left is collected meanwhile; a leak would add six
        assert server.children() == []
        watched.client.close()

    asyncio.run(run())


def test_a_dead_forkserver_is_noticed(tmp_path: Path, silent: tuple[str, int]) -> None:
    async def run() -> None:
        watched = Watched()
        await watched.start()
        trainer = watched.client.fork(1, 0, assignment(tmp_path, silent))
        await watched.until(lambda: trainer.pid)
        assert trainer.pid
        os.kill(forkserver_of(watched.client).pid, signal.SIGKILL)
        await asyncio.wait_for(watched.client.wait_closed(), 60)
        await_exit(trainer.pid)
        watched.client.close()

    asyncio.run(run())


HOST = """
import asyncio, json, sys
from elastic_train.controller.forkserver_client import ForkServerClient

async def main():
    client, forked = ForkServerClient(1), asyncio.Event()
    await client.start(lambda trainer, message: forked.set(), lambda trainer, code: None)
    trainer = client.fork(1, 0, json.loads(sys.argv[1]))
    await forked.wait()
    print(json.dumps([client._process.pid, trainer.pid]), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_forkserver_and_trainer_end_with_their_killed_host(tmp_path: Path, silent: tuple[str, int]) -> None:
    with program(HOST, json.dumps(assignment(tmp_path, silent))) as host:
        server, trainer = json.loads(host.hear())
        assert psutil.Process(trainer).ppid() == server
        assert psutil.Process(server).ppid() == host.pid
        host.kill()
        await_exit(trainer)
        await_exit(server)


TRAINER = """
import json, socket, sys, threading
from datetime import timedelta
from elastic_train.controller.forkserver import preload
preload()
assert threading.active_count() == 1, threading.enumerate()
from torch.distributed import TCPStore
from elastic_train.controller import trainer
from elastic_train.controller.control_block import ControlBlock
assignment = json.load(open(sys.argv[1]))
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
assignment["store"] = ["127.0.0.1", store.port]
control = ControlBlock(assignment["control"], create=True)
control.allow(assignment["start_step"], 0)
before = set(sys.modules)
ours, theirs = socket.socketpair()
said = []

def host():
    for line in ours.makefile("rb"):
        message = json.loads(line)
        said.append(message)
        if message["type"] == "stepped":
            control.allow(message["step"], 1 - message["buffer"])
        if message["type"] in ("completed", "error"):
            ours.shutdown(socket.SHUT_RDWR)

thread = threading.Thread(target=host)
thread.start()
ours.sendall(json.dumps(assignment).encode() + b"\\n")
code = trainer.main(theirs)
theirs.close()
thread.join()
print(json.dumps([code, said[-1], sorted(set(sys.modules) - before)]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fresh", "checkpoint"])
def test_a_trainer_has_nothing_left_to_import(corpus: Path, tmp_path: Path, kind: str) -> None:
    """The forkserver's imports, then a trainer's whole life in the same process: from a fresh start, a checkpoint."""
    options = ("schedule.warmup_steps=0", "hosts.max=1")
    job = make_job(corpus, tmp_path, "imports", "training.steps=2", *options)
    told = assignment(
        tmp_path,
        ("", 0),
        layout={"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1},
        job=job.as_dict(),
        job_folder=str(tmp_path / "imports"),
        interface="lo",
    )
    if kind == "checkpoint":
        with LocalJob(make_job(corpus, tmp_path, "imports", "training.steps=1", *options)) as first:
            first.start_host("only", "a")
            assert first.finish()["state"] == "finished"
        told["restore"] |= {"step": 1, "checkpoint": 1}
        told["start_step"] = 1
    (tmp_path / "assignment.json").write_text(json.dumps(told))
    with program(TRAINER, str(tmp_path / "assignment.json"), environment={"OMP_NUM_THREADS": "1"}) as trainer:
        code, last, imported = json.loads(trainer.hear())
    assert (code, last["type"], last.get("error")) == (0, "completed", None)
    assert imported == []
