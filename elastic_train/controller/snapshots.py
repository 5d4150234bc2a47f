"""Snapshots beside the computation: while the next step is computed, a thread copies the state of the last one.

Only the next update has to wait for the copy, because only an update changes the state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from elastic_train.checkpoint.capture import Capture
from elastic_train.checkpoint.errors import NoRoom
from elastic_train.checkpoint.image import Image, image_name, remove_older
from elastic_train.controller.control_block import ControlBlock
from elastic_train.controller.wire import Message

_POLL_SECONDS = 0.0005
_BUFFERS = 2
"""What a rank cannot do without; a further one is only needed while an upload reads one of them."""


class Snapshots:
    """One trainer's images in the pool of its node.

    Args:
        capture: of the trainer's state.
        control: where the host says which buffer may be written.
        wait_finished: returns when a step is whole on all ranks and partners.
        tell: sends a message to the host; called from another thread.
        keep: names of older images that must not be removed to make room.
    """

    def __init__(
        self,
        capture: Capture,
        control: ControlBlock,
        wait_finished: Callable[[int], None],
        tell: Callable[[Message], None],
        pool: Path,
        generation: int,
        rank: int,
        keep: Collection[str],
    ) -> None:
        self._capture, self._control, self._tell = capture, control, tell
        self._wait_finished = wait_finished
        self._pool, self._generation, self._rank, self._keep = pool, generation, rank, keep
        self._images: dict[int, Image] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="et-snapshot")
        # While the first step is computed, and before partners' copies may take the room.
        self._pending: Future[None] | None = self._thread.submit(self._allocate)

    def _allocate(self) -> None:
        for buffer in range(_BUFFERS):
            self._image(buffer)

    def begin(self, step: int, message: Message) -> None:
        """Start to copy the state, which is that of ``step``; ``message`` is told when its image is whole."""
        self.wait()
        self._capture.settle()
        self._pending = self._thread.submit(self._write, step, message)

    def wait(self) -> None:
        """Return when the state may be changed.

        Raises:
            NoRoom: the memory file system of this node is full.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, step: int, message: Message) -> None:
        # The last but one image is free once the last one is whole everywhere.
        self._wait_finished(step - 1)
        started = time.time()
        buffer, image = self._next_image()
        self._capture.write(image, step)
        told = {"buffer": buffer, "image": image.path.name, "snapshot_seconds": time.time() - started}
        self._tell(message | told)

    def _next_image(self) -> tuple[int, Image]:
        while True:
            buffer = self._control.next_buffer
            try:
                return buffer, self._image(buffer)
            except NoRoom as error:
                if buffer < _BUFFERS:
                    raise
                self._tell({"type": "no_buffer", "buffer": buffer, "error": str(error)})
            while self._control.next_buffer == buffer:
                time.sleep(_POLL_SECONDS)

    def _image(self, buffer: int) -> Image:
        if buffer not in self._images:
            self._images[buffer] = self._create(self._pool / image_name(self._generation, self._rank, buffer))
        return self._images[buffer]

    def _create(self, path: Path) -> Image:
        description = self._capture.description
        try:
            return Image.create(path, self._generation, self._rank, description)
        except NoRoom:
            remove_older(self._pool, self._generation, self._keep)
            return Image.create(path, self._generation, self._rank, description)
