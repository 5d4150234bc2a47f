"""Runs a function on N gloo ranks, forked from one warm process that has torch and the engine imported.

``run_ranks(function, 4, args...)`` calls ``function(rank, args...)`` on four ranks inside an initialised process group
and returns the four results. ``function`` must be importable by name. Fork is safe because the warm process itself
never starts a process group or an autograd thread; pytest's own process may, so ranks are never forked from it.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class RankError(AssertionError):
    """A rank raised, died or did not finish in time; the message has its traceback."""


class RankServer:
    """Handle on the warm process, held by pytest."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(paths))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.ranks", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            env=environment,
        )
        theirs.close()
        self._connection = Connection(ours.detach())

    def run(self, function: Callable[..., Any], world: int, arguments: tuple[Any, ...], timeout: float) -> list[Any]:
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            self._connection.send((function.__module__, function.__qualname__, world, arguments, timeout, folder))
            failure = self._connection.recv()
            if failure is not None:
                raise RankError(failure)
            return [pickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(world)]

    def close(self) -> None:
        self._connection.close()
        self._process.wait(timeout=30)


_server: RankServer | None = None


def run_ranks(function: Callable[..., Any], world: int, *arguments: Any, timeout: float = 150.0) -> list[Any]:
    """Results of ``function(rank, *arguments)``, in rank order. Raises RankError; no rank survives the call."""
    global _server
    if _server is None:
        _server = RankServer()
        atexit.register(_server.close)
    return _server.run(function, world, arguments, timeout)


def _rank_main(
    rank: int, module: str, name: str, world: int, arguments: tuple[Any, ...], timeout: float, folder: str
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        function = getattr(importlib.import_module(module), name)
        store = dist.FileStore(f"{folder}/store", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
        result = function(rank, *arguments)
        dist.barrier()
        Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
        code = 0
    except BaseException:
        Path(folder, f"error-{time.time_ns()}-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        code = 1
    # No interpreter shutdown: it would wait for the process group of a rank that failed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve(connection: Connection) -> None:
    import elastic_train.training.engine  # noqa: F401

    while True:
        try:
            module, name, world, arguments, timeout, folder = connection.recv()
        except EOFError:
            return
        children: dict[int, int] = {}
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                _rank_main(rank, module, name, world, arguments, timeout, folder)
            children[os.pidfd_open(pid)] = pid
        failure = _wait(children, connection, time.monotonic() + timeout)
        errors = sorted(Path(folder).glob("error-*"))
        connection.send(errors[0].read_text() if errors else failure)


def _wait(children: dict[int, int], connection: Connection, deadline: float) -> str | None:
    """None when all exited with 0; else the reason. Kills and reaps whoever is left."""
    failure: str | None = None
    while children and failure is None:
        ready, _, _ = select.select([*children, connection], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            failure = f"{len(children)} rank(s) did not finish in time"
        elif connection in ready:
            failure = "pytest went away"
        for descriptor in [item for item in ready if item in children]:
            _, status = os.waitpid(children.pop(descriptor), 0)
            os.close(descriptor)
            if status:
                failure = f"a rank ended with wait status {status}"
    for descriptor, pid in children.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(descriptor)
    return failure


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
