"""Sending snapshots to a partner host on another node (tier 1)."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from elastic_train.checkpoint.peer import Peer


class PartnerLink:
    """One connection to one partner's byte server; images go over it one after the other, off the event loop."""

    def __init__(self, address: tuple[str, int], token: str) -> None:
        self._peer = Peer(address, token)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="et-partner")

    async def send(self, path: Path, step: int) -> None:
        """Return when the partner holds the image at ``path``, of ``step``, whole and verified.

        Raises:
            CheckpointError: the image is no longer of that step, or the partner refused it or cannot be reached.
        """
        await asyncio.get_running_loop().run_in_executor(self._thread, self._peer.put, path, step)

    def close(self) -> None:
        self._peer.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
