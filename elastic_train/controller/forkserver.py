"""The forkserver of a host: a process that has imported the engine once and forks one trainer per generation.

Run as ``python -m elastic_train.controller.forkserver COMMAND_FD EVENT_FD``. Every byte on the command socket asks for
one trainer and brings the trainer's end of its channel as a file descriptor. Events are JSON lines: ``ready``,
``forked``, ``exited``. When the host is gone the command socket closes, and the forkserver and its trainers end.

It must never start threads, a process group, CUDA or a backward pass: children of a forked thread pool would hang.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import sys
import threading
import time

from elastic_train.controller.process_control import end_with_parent, name_process
from elastic_train.controller.wire import encode


def preload() -> None:
    """Import everything that a trainer needs, so that a fork has nothing left to import."""
    gc.disable()  # a fifth of the time would go into collections that find next to nothing
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    import elastic_train.controller.trainer
    import elastic_train.storage.local  # noqa: F401

    gc.enable()
    gc.collect()
    gc.freeze()  # else the first full collection of every trainer walks, and so copies, all that was imported


class ForkServer:
    """The loop of the forkserver process."""

    def __init__(self, commands: socket.socket, events: socket.socket) -> None:
        self._commands = commands
        self._events = events
        self._children: set[int] = set()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)

    def run(self) -> None:
        started = time.perf_counter()
        preload()
        extra = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        if extra:
            raise RuntimeError(f"the forkserver must have one thread before it forks, found also {extra}")
        signal.set_wakeup_fd(self._wake_write.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._tell({"type": "ready", "pid": os.getpid(), "seconds": time.perf_counter() - started})
        selector = selectors.DefaultSelector()
        selector.register(self._commands, selectors.EVENT_READ)
        selector.register(self._wake_read, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is self._wake_read:
                    self._wake_read.recv(4096)
                    self._reap()
                elif not self._serve():
                    self._end()
                    return

    def _tell(self, message: dict[str, object]) -> None:
        self._events.sendall(encode(message))

    def _serve(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._commands, 1, 1)
        if not data:
            return False
        pid = os.fork()
        if pid == 0:
            self._become_trainer(descriptors[0])
        os.close(descriptors[0])
        self._children.add(pid)
        self._tell({"type": "forked", "pid": pid})
        return True

    def _become_trainer(self, descriptor: int) -> None:
        """Never returns: the child runs the trainer and leaves without the parent's clean-up handlers."""
        code = 1
        try:
            end_with_parent()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited in (self._commands, self._events, self._wake_read, self._wake_write):
                inherited.close()
            from elastic_train.controller import trainer

            code = trainer.main(socket.socket(fileno=descriptor))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._children.discard(pid)
            self._tell({"type": "exited", "pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _end(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    end_with_parent()
    name_process("et-forkserver")
    commands, events = (socket.socket(fileno=int(value)) for value in sys.argv[1:3])
    try:
        ForkServer(commands, events).run()
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(1)  # the host is gone; trainers die with this process


if __name__ == "__main__":
    main()
