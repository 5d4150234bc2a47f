"""Python processes of tests: started, talked to by lines, waited for by pidfd, never by sleeping."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.warm import WarmProcess

ROOT = Path(__file__).parents[2]


class Conversation:
    """With a process: ``tell`` writes a line to its stdin, ``hear`` reads one of its stdout."""

    def __init__(self, process: subprocess.Popen[str] | WarmProcess) -> None:
        self.process = process

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        """The next line; fails when the program ended instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the program ended with exit code {self.process.wait()}"
        return line.rstrip("\n")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Close its stdin and wait; returns the exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(60)


class Program(Conversation):
    """A running ``python -c``."""

    def __init__(self, code: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        super().__init__(
            subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            )
        )


@contextmanager
def program(code: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Program]:
    """A program that is killed at the end if it still runs."""
    running = Program(code, *arguments, environment=environment)
    try:
        yield running
    finally:
        running.kill()
        for pipe in (running.process.stdin, running.process.stdout):
            if pipe is not None:
                pipe.close()


def await_exit(pid: int, seconds: float = 60.0) -> None:
    """Returns when the process has ended, whoever its parent is."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ended, _, _ = select.select([descriptor], [], [], seconds)
        assert ended, f"process {pid} still runs after {seconds} s"
    finally:
        os.close(descriptor)
