"""Starts processes of tests by forking them from one warm process, which has torch and the engine imported.

``start("module:function")`` is ``subprocess.Popen`` of a Python process that runs ``function()``, without the seconds
that its imports take: its own environment, working directory, stdin and stdout, and nothing else of the caller's. Fork
is safe because the warm process has one thread and never computes or opens anything; pytest's own process is not like
that. What a test says of the start of a process itself needs a process that is really started.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
_MODULES = ("elastic_train.controller.rendezvous", "tests.apart_job", "tests.host_program")
"""What the processes would otherwise import, beside what a trainer needs."""


class WarmProcess:
    """One process; the part of ``subprocess.Popen`` that tests use. Its parent, which reaps it, is the warm process."""

    def __init__(self, channel: socket.socket, stdin: int, stdout: int) -> None:
        self.stdin, self.stdout = os.fdopen(stdin, "w"), os.fdopen(stdout)
        self.returncode: int | None = None
        self._channel = channel
        said, (self._pidfd,), _, _ = socket.recv_fds(channel, 64, 1)
        self.pid = int(said)

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._channel], [], [], 0)[0]:
            self._hear_end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._channel], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"warm process {self.pid}", timeout or 0.0)
        return self.returncode if self.returncode is not None else self._hear_end()

    def _hear_end(self) -> int:
        said = self._channel.recv(64)
        assert said, "the warm process is gone"
        self._channel.close()
        os.close(self._pidfd)
        self.returncode = int(said)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing happens when it has ended, as with ``subprocess.Popen``."""
        if self.poll() is None:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                self.wait()

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Warm:
    """Handle on the warm process, held by pytest. Everything ends with it."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), *filter(None, sys.path)]))
        environment |= {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            env=environment,
        )
        theirs.close()

    def start(self, function: str, arguments: tuple[str, ...]) -> WarmProcess:
        channel, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stdin, our_stdin = os.pipe()
        our_stdout, stdout = os.pipe()
        request = json.dumps(
            {
                "function": function,
                "arguments": arguments,
                "folder": os.getcwd(),
                "environment": dict(os.environ),
            }
        )
        given = [stdin, stdout, 2, its_end.fileno()]
        socket.send_fds(self._requests, [request.encode()], given)
        os.close(stdin)
        os.close(stdout)
        its_end.close()
        return WarmProcess(channel, our_stdin, our_stdout)

    def close(self) -> None:
        self._requests.close()
        self._process.wait(timeout=30)


_warm: _Warm | None = None
_starting = threading.Lock()


def start(function: str, *arguments: str) -> WarmProcess:
    """A process that runs ``function``, "module:name", with ``sys.argv[1:]`` and with pipes as its stdin and stdout."""
    global _warm
    with _starting:
        if _warm is None:
            _warm = _Warm()
            atexit.register(_warm.close)
    return _warm.start(function, arguments)


class Unborn:
    """A child that waits to become the forkserver of its parent, a process of ``start``; a ``ForkServerProcess``.

    Made while its parent has one thread. A host begins its forkserver when it has several.
    """

    def __init__(self) -> None:
        self._order, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            self._order.close()
            _run(lambda: _become_forkserver(theirs))
        theirs.close()

    def begin(self, commands: int, events: int, environment: dict[str, str]) -> Unborn:
        socket.send_fds(self._order, [json.dumps(environment).encode()], [commands, events])
        self._order.close()
        return self

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        descriptor = os.pidfd_open(self.pid)
        try:
            if not select.select([descriptor], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("forkserver", timeout or 0.0)
        finally:
            os.close(descriptor)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _become_forkserver(order: socket.socket) -> None:
    """The main program of ``elastic_train.controller.forkserver``, as if it had been started with that environment."""
    from elastic_train.controller import forkserver
    from elastic_train.controller.process_control import end_with_parent

    end_with_parent()
    environment, descriptors, _, _ = socket.recv_fds(order, 1 << 20, 2)
    order.close()
    if not environment:
        return  # the host has ended before
    os.environ.clear()
    os.environ.update(json.loads(environment))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.argv = ["forkserver", *map(str, descriptors)]
    forkserver.main()


class _Server:
    """Forks what is asked for and tells of its end."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._running: dict[int, tuple[int, socket.socket]] = {}
        """pidfd -> pid, and the channel to whoever asked"""

    def run(self) -> None:
        """Until pytest is gone; then nothing is left."""
        while True:
            for ready in select.select([self._requests, *self._running], [], [])[0]:
                if ready is not self._requests:
                    self._reap(ready)
                elif not self._start():
                    for pid, _ in self._running.values():
                        os.kill(pid, signal.SIGKILL)
                    return

    def _start(self) -> bool:
        request, descriptors, _, _ = socket.recv_fds(self._requests, 1 << 20, 4)
        if not request:
            return False
        *streams, its_end = descriptors
        channel = socket.socket(fileno=its_end)
        pid = os.fork()
        if pid == 0:
            channel.close()
            self._forget()
            _run(lambda: _become(json.loads(request), streams))
        for descriptor in streams:
            os.close(descriptor)
        pidfd = os.pidfd_open(pid)
        self._running[pidfd] = pid, channel
        _tell(channel, str(pid), pidfd)
        return True

    def _forget(self) -> None:
        """In a child: what is only its parent's."""
        self._requests.close()
        for descriptor, (_, channel) in self._running.items():
            os.close(descriptor)
            channel.close()

    def _reap(self, pidfd: int) -> None:
        pid, channel = self._running.pop(pidfd)
        os.close(pidfd)
        _tell(channel, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        channel.close()


def _tell(channel: socket.socket, word: str, *descriptors: int) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # nobody waits for it any more
        socket.send_fds(channel, [word.encode()], descriptors)


def _become(request: dict[str, Any], streams: list[int]) -> None:
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = [request["function"], *request["arguments"]]
    module, _, name = request["function"].partition(":")
    getattr(importlib.import_module(module), name)()


def _run(function: Callable[[], None]) -> NoReturn:
    """In a child: what is left of a Python process's life. Taking all modules apart at its end would take 0.3 s."""
    code = 1
    try:
        function()
        threading._shutdown()  # type: ignore[attr-defined]  # waits for its threads, as multiprocessing does
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _main() -> None:
    from elastic_train.controller.forkserver import preload

    for module in _MODULES:
        importlib.import_module(module)
    preload()
    assert threading.active_count() == 1, threading.enumerate()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest's own end ends us
    _Server(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    _main()
