"""Copies a rank's shards into a snapshot image, beside the computation of the next step."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from weakref import WeakKeyDictionary, WeakSet

import torch

from elastic_train.checkpoint.description import Chunk, Description, aligned
from elastic_train.checkpoint.errors import ImageError
from elastic_train.checkpoint.image import Image
from elastic_train.parallel.shard import LocalShard

logger = logging.getLogger(__name__)


class Capture:
    """Snapshots one state. The tensors must stay the live ones: they are read anew by each ``write``.

    ``write`` may run in another thread than the computation, as long as nothing changes the state meanwhile: torch
    copies without the interpreter's lock. On CUDA it copies on a stream of its own into memory that is pinned once per
    image; ``settle`` puts the copies behind what the computation has queued so far.
    """

    def __init__(self, state: Mapping[str, LocalShard], constant: Collection[str] = ()) -> None:
        """``state`` maps logical keys to shards; empty shards get no chunk. Raises ValueError for a strided shard.

        ``constant``: keys of tensors that never change: they are written into each image once.
        """
        held = {key: shard for key, shard in state.items() if shard.tensor.numel()}
        self._sources = [shard.tensor.detach() for shard in held.values()]
        self.description = describe(held)
        self._changing = [index for index, key in enumerate(held) if key not in constant]
        self._filled: WeakSet[Image] = WeakSet()
        self._views: WeakKeyDictionary[Image, list[torch.Tensor]] = WeakKeyDictionary()
        device = next((source.device for source in self._sources if source.is_cuda), None)
        self._stream = None if device is None else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        """The next ``write`` copies the state as it is after all work queued by now. For the thread that computes."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def write(self, image: Image, step: int) -> None:
        """Makes ``image`` hold ``step``; returns when it does. Killed at any instant, it leaves the image torn, never
        wrong.
        """
        views = self._views_of(image)
        wanted = self._changing if image in self._filled else range(len(views))
        targets, sources = [views[index] for index in wanted], [self._sources[index] for index in wanted]
        image.begin(step)
        if targets and self._stream is not None:
            with torch.cuda.stream(self._stream):
                torch._foreach_copy_(targets, sources, non_blocking=True)
            self._stream.synchronize()
        elif targets:
            torch._foreach_copy_(targets, sources)
        image.finish(step)
        self._filled.add(image)

    def _views_of(self, image: Image) -> list[torch.Tensor]:
        views = self._views.get(image)
        if views is None:
            if image.nbytes != self.description.nbytes:
                raise ImageError(f"{image.path} has {image.nbytes} bytes; the state needs {self.description.nbytes}")
            if self._stream is not None:
                _pin(image)
            views = self._views[image] = image_views(image, self.description)
        return views


def _pin(image: Image) -> None:
    """Lets the GPU write into the image by itself. Where the driver refuses, copies are right but slower."""
    if image.nbytes:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        failure = runtime.cudaHostRegister(image.data.ctypes.data, image.nbytes, 0)
        if int(failure) != 0:
            logger.warning("%s cannot be pinned (CUDA error %s); snapshots take longer", image.path, failure)


def describe(state: Mapping[str, LocalShard]) -> Description:
    """The chunks of the shards that are not empty, in the order of ``state``, each at an aligned offset."""
    chunks = []
    end = 0
    for key, shard in state.items():
        tensor = shard.tensor
        if not tensor.numel():
            continue
        if not tensor.is_contiguous():
            shape = tuple(tensor.shape)
            raise ValueError(f"shard {key} of shape {shape} has strides {tensor.stride()}; it must be contiguous")
        begin = aligned(end)
        end = begin + tensor.nbytes
        place = tuple(shard.global_shape), tuple(shard.offsets), tuple(tensor.shape)
        chunks.append(Chunk(key, dtype_name(tensor.dtype), *place, begin, tensor.nbytes))
    return Description(tuple(chunks), aligned(end))


def image_views(image: Image, description: Description) -> list[torch.Tensor]:
    """One tensor per chunk over the memory of ``image``, with the chunk's dtype and sizes."""
    whole = torch.from_numpy(image.data)
    views = []
    for chunk in description.chunks:
        flat = whole[chunk.byte_offset : chunk.byte_offset + chunk.nbytes]
        views.append(flat.view(dtype_of(chunk.dtype)).view(chunk.sizes))
    return views


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 -> "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """ "float32" -> torch.float32; raises ValueError for a name that is no dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {name!r} is not one of torch's")
    return dtype
