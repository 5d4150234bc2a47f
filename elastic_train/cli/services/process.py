"""A process that outlives the command that started it, and is known again later: by its number and its start time.

It leads a session of its own, by which its processes are found once it is dead itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

END_SECONDS = 10.0
"""Between SIGTERM and SIGKILL."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """``start``: boot and clock tick at which the process ``pid`` began; a number alone is given to others later."""

    pid: int
    start: str

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Of a process that is there. Raises ``OSError``."""
        return cls(pid, _start(pid))

    def alive(self) -> bool:
        """Whether this very process still runs."""
        try:
            return _start(self.pid) == self.start and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except (OSError, psutil.NoSuchProcess):
            return False

    def memory(self) -> int:
        """Bytes that it and its children have in memory; 0 when all are gone."""
        total = 0
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    def end(self, number: signal.Signals) -> bool:
        """Send ``number`` to it, then SIGKILL to what is left of it and its children; False when all are gone already.

        When only it is gone, its children get ``number``.
        """
        tree = self._tree()
        if not tree:
            return False
        for process in [one for one in tree if one.pid == self.pid] or tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)  # psutil looks at the start time again
        _, left = psutil.wait_procs(tree, timeout=0 if number == signal.SIGKILL else END_SECONDS)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=END_SECONDS)
        return True

    def _tree(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self.pid) if self.alive() else None
            tree = [root, *root.children(recursive=True)] if root else []
        except psutil.NoSuchProcess:
            tree = []
        return tree + [process for process in self._session() if process not in tree]

    def _session(self) -> Iterator[psutil.Process]:
        """The living processes of the session that it leads, or led.

        The kernel gives its number to nobody while one of them lives: one that began earlier, or on another boot, is of
        somebody else's session.
        """
        with contextlib.suppress(OSError):
            if _start(self.pid) != self.start:
                return
        boot, _, ticks = self.start.rpartition("/")
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if os.getsid(process.pid) != self.pid or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                its_boot, _, its_ticks = _start(process.pid).rpartition("/")
                if its_boot == boot and int(its_ticks) >= int(ticks):
                    yield process


def _start(pid: int) -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{boot}/{ticks}"


def start_detached(command: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path) -> ProcessId:
    """Start ``command`` in ``folder`` in a session of its own, with its output added to ``log``."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    return ProcessId.of(process.pid)


def wait_until_ready(process: ProcessId, url: str, seconds: float) -> bool:
    """Whether ``url`` answers with 200 within ``seconds`` while the process lives."""
    import http.client
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.alive():
        try:
            with opener.open(url, timeout=2) as reply:
                if reply.status == 200 and process.alive():
                    return True
        except (OSError, http.client.HTTPException):  # nobody listens, or it is no HTTP yet
            time.sleep(0.1)
    return False
