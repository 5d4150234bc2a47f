"""Copies of a host's images on hosts of other nodes (tier 1)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from elastic_train.checkpoint.errors import CheckpointError, NoRoom
from elastic_train.checkpoint.peer import Peer
from elastic_train.controller.story import Story
from elastic_train.controller.wire import Message


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


class PartnerCopies:
    """That one host makes of its images.

    Args:
        pool: the folder of its images.
        story: is told what became of each.
        tell: the coordinator, after the story.
        spawn: runs a coroutine beside everything else.
    """

    def __init__(
        self,
        pool: Path,
        token: str,
        story: Story,
        tell: Callable[[Message], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._pool, self._token, self._story, self._tell, self._spawn = pool, token, story, tell, spawn
        self._links: dict[tuple[str, int], PartnerLink] = {}

    def send(self, partners: Sequence[Message], image: Message) -> None:
        """To each of ``partners`` (``HostRecord.as_partner``) the ``image`` of a generation, rank and step."""
        for partner in partners:
            address = (str(partner["address"][0]), int(partner["address"][1]))
            if address not in self._links:
                self._links[address] = PartnerLink(address, self._token)
            self._spawn(self._copy(self._links[address], partner["node"], partner["needed"], image))

    async def _copy(self, link: PartnerLink, node: str, needed: bool, image: Message) -> None:
        told = {key: image[key] for key in ("generation", "rank", "step", "image")} | {"node": node}
        try:
            await link.send(self._pool / image["image"], image["step"])
        except NoRoom as error:
            self._story.refused(image["generation"], image["step"], node)
            self._tell({"type": "copy_refused", "error": str(error), **told})
        except (OSError, CheckpointError) as error:
            if not needed:
                self._story.refused(image["generation"], image["step"], node)
                self._tell({"type": "copy_dropped", "error": str(error), **told})
                return
            failed = {"type": "copy_failed", "error": str(error), **told}
            self._story.copy_failed(failed)
            self._tell(failed)
        else:
            self._story.held(image["generation"], image["step"], node, image["image"])
            self._tell({"type": "held", **told})

    def close(self) -> None:
        for link in self._links.values():
            link.close()
