"""Starts and ends the rendezvous store's process for the coordinator."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process


class Rendezvous:
    """The job's TCPStore; ``endpoint`` is (address, port) once started."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._process: Process | None = None
        self.endpoint: tuple[str, int] = (address, 0)

    async def start(self) -> None:
        """Raises RuntimeError when the store does not come up."""
        module = "elastic_train.controller.rendezvous"
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, self._address, stdin=PIPE, stdout=PIPE
        )
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line.strip().isdigit():
            raise RuntimeError(f"the rendezvous store did not start on {self._address}: it printed {line!r}")
        self.endpoint = (self._address, int(line))

    async def close(self) -> None:
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.communicate()
