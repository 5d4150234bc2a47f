"""The host's side of the forkserver: start it, ask for trainers, hear from them, kill them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from elastic_train.controller.control_block import ControlBlock
from elastic_train.controller.wire import LINE_LIMIT, Connection, Message, decode

logger = logging.getLogger(__name__)


class TrainerProcess:
    """One trainer. It exists from the moment it is asked for; its pid is known a little later."""

    def __init__(self, generation: int, rank: int, control: ControlBlock) -> None:
        self.generation = generation
        self.rank = rank
        self.control = control
        self.pid: int | None = None
        self.ended = asyncio.Event()
        self._pidfd: int | None = None
        self._killed = False
        self._channel: Connection | None = None

    def started(self, pid: int) -> None:
        self.pid = pid
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return  # it has ended and been reaped already
        if self._killed:
            self.kill()

    def converse(self, channel: Connection) -> None:
        """Its end of the socket is open."""
        self._channel = channel

    def tell(self, message: Message) -> None:
        """Send it a line; it must have said something before."""
        assert self._channel is not None
        self._channel.send(message)

    def kill(self) -> None:
        """SIGKILL, now or as soon as the process exists. A pidfd, so that a reused pid is never hit."""
        self._killed = True
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self.release()

    def release(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def _environment(threads: int) -> dict[str, str]:
    """The forkserver's environment: our import path, and one compute thread pool size for every library."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = str(threads)
    return environment


class ForkServerProcess(Protocol):
    """What a host does with the process of its forkserver, which is its child (``subprocess.Popen`` is one)."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int:
        """Reap it. Raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds."""


BeginForkServer = Callable[[int, int, dict[str, str]], ForkServerProcess]
"""Makes a forkserver of a child of the calling thread. It is given its ends of the command and the event socket, as
descriptors that stay the caller's, and its environment."""


def begin_python(commands: int, events: int, environment: dict[str, str]) -> ForkServerProcess:
    """In a new interpreter, which has everything to import: some seconds of a core."""
    return subprocess.Popen(
        [sys.executable, "-m", "elastic_train.controller.forkserver", str(commands), str(events)],
        pass_fds=(commands, events),
        stdin=subprocess.DEVNULL,
        env=environment,
    )


class ForkServerClient:
    """Owns one forkserver process and the trainers forked from it.

    Args:
        threads: of the libraries that compute, in each trainer.
        begin: how the process comes to be; a caller that has one with everything imported already can give it away.
    """

    def __init__(self, threads: int, begin: BeginForkServer = begin_python) -> None:
        self._threads, self._begin = threads, begin
        self._ready: asyncio.Future[float] | None = None
        self._waiting: deque[TrainerProcess] = deque()
        self._trainers: dict[int, TrainerProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = asyncio.Event()

    async def start(
        self,
        on_message: Callable[[TrainerProcess, Message], None],
        on_end: Callable[[TrainerProcess, int | None], None],
    ) -> None:
        """Start the process. ``on_message`` gets a trainer's lines, ``on_end`` its end (code None: killed by us)."""
        self._on_message, self._on_end = on_message, on_end
        self._ready = asyncio.get_running_loop().create_future()
        self._commands, command_end = socket.socketpair()
        events, event_end = socket.socketpair()
        # Started from the loop's own thread: the child dies with the thread that made it (PR_SET_PDEATHSIG).
        self._process = self._begin(command_end.fileno(), event_end.fileno(), _environment(self._threads))
        command_end.close()
        event_end.close()
        reader, self._event_writer = await asyncio.open_unix_connection(sock=events, limit=LINE_LIMIT)
        self._start_task(self._hear(reader))

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait_ready(self) -> float:
        """Seconds the imports took, once they are done."""
        assert self._ready is not None
        return await self._ready

    async def wait_closed(self) -> None:
        await self._closed.wait()

    def fork(self, generation: int, rank: int, assignment: Message) -> TrainerProcess:
        """Ask for a trainer; the assignment follows over the trainer's own channel."""
        control = ControlBlock(assignment["control"], create=True)
        control.allow(assignment["start_step"], 0)
        trainer = TrainerProcess(generation, rank, control)
        ours, theirs = socket.socketpair()
        self._waiting.append(trainer)
        socket.send_fds(self._commands, [b"f"], [theirs.fileno()])
        theirs.close()
        self._start_task(self._converse(trainer, ours, assignment))
        return trainer

    async def _converse(self, trainer: TrainerProcess, ours: socket.socket, assignment: Message) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=LINE_LIMIT)
        connection = Connection(reader, writer)
        trainer.converse(connection)
        connection.send(assignment)
        try:
            while (message := await connection.receive()) is not None:
                self._on_message(trainer, message)
        finally:
            connection.close()

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            event = decode(line)
            if event["type"] == "ready":
                assert self._ready is not None
                self._ready.set_result(event["seconds"])
            elif event["type"] == "forked":
                trainer = self._waiting.popleft()
                self._trainers[event["pid"]] = trainer
                trainer.started(event["pid"])
                self._on_message(trainer, {"type": "forked", "pid": event["pid"]})
            elif event["type"] == "exited" and (ended := self._trainers.pop(event["pid"], None)) is not None:
                ended.release()
                ended.ended.set()
                self._on_end(ended, event["code"])
        self._closed.set()

    def close(self) -> None:
        """Kill all trainers and the forkserver, and wait until they are gone."""
        for trainer in [*self._waiting, *self._trainers.values()]:
            trainer.kill()
        self._commands.close()  # the forkserver kills what is left of its children and ends
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for task in self._tasks:
            task.cancel()
        self._event_writer.close()
