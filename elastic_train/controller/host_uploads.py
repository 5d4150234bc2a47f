"""A host's part of the checkpoints: its images go to storage from threads, and are not written over meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from elastic_train.checkpoint.description import Description
from elastic_train.checkpoint.image import Image
from elastic_train.checkpoint.upload import upload_image
from elastic_train.controller.wire import Message
from elastic_train.storage.store import Store

logger = logging.getLogger(__name__)


class Uploads:
    """Of one host.

    Args:
        pool: the folder of its images.
        open_store: the job folder's.
        tell: the coordinator.
        spawn: runs a coroutine beside everything else.
    """

    def __init__(
        self,
        pool: Path,
        open_store: Callable[[], Store],
        tell: Callable[[Message], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._pool, self._open_store, self._tell, self._spawn = pool, open_store, tell, spawn
        self._workers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="et-upload")
        self._running: dict[str, str] = {}
        """object -> the image that must not be written over, because it is being read for it"""

    def reads(self, image: str) -> bool:
        """Whether ``image`` must not be written over."""
        return image in self._running.values()

    def begin(self, order: Message, trainer_runs: bool) -> None:
        """As the coordinator orders. While a trainer runs, one image at a time."""
        path, name = order["object"], order["image"]
        others = set(self._running.values()) - {name}
        if others and trainer_runs:  # each of them costs memory
            error = f"{name} is not uploaded: {', '.join(sorted(others))} still is"
            self._tell({"type": "uploaded", "object": path, "error": error})
            return
        self._running[path] = name
        self._spawn(self._upload(order))

    def give_up(self, reason: str) -> None:
        """Let the trainer have its buffers back. The uploads go on; what they read will not be the step they want."""
        for path, name in self._running.items():
            self._tell({"type": "uploaded", "object": path, "error": f"upload of {name} given up: {reason}"})
        self._running.clear()

    def close(self) -> None:
        """Return when no thread reads an image any more."""
        self._workers.shutdown(wait=True, cancel_futures=True)

    async def _upload(self, order: Message) -> None:
        reply: Message = {"type": "uploaded", "object": order["object"]}
        try:
            reply |= await asyncio.get_running_loop().run_in_executor(self._workers, self._upload_now, order)
        except Exception as error:
            logger.warning("upload of %s failed", order["image"], exc_info=True)
            reply["error"] = f"{type(error).__name__}: {error}"
        if self._running.pop(order["object"], None) is not None:
            self._tell(reply)

    def _upload_now(self, order: Message) -> Message:
        image = Image.open(self._pool / order["image"])
        try:
            store = self._open_store()
            description = Description.from_json(order["description"])
            uploaded = upload_image(image, order["step"], description, order["chunks"], store, order["object"])
            return {"uploaded": uploaded.model_dump(mode="json"), "retries": store.retries}
        finally:
            image.close()
