"""Copies a rank's shards into a snapshot image: the one piece of work that a step waits for."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch

from elastic_train.checkpoint.description import Chunk, Description, aligned
from elastic_train.checkpoint.errors import ImageError
from elastic_train.checkpoint.image import Image
from elastic_train.parallel.shard import LocalShard


class Capture:
    """Snapshots one state. The tensors must stay the live ones: they are read anew by each ``write``."""

    def __init__(self, state: Mapping[str, LocalShard]) -> None:
        """``state`` maps logical keys to shards; empty shards get no chunk. Raises ValueError for a strided shard."""
        held = {key: shard for key, shard in state.items() if shard.tensor.numel()}
        self._sources = [shard.tensor.detach() for shard in held.values()]
        self.description = describe(held)
        self._views: WeakKeyDictionary[Image, list[torch.Tensor]] = WeakKeyDictionary()

    def write(self, image: Image, step: int) -> None:
        """Makes ``image`` hold ``step``. Killed at any instant, it leaves the image torn, never wrong."""
        views = self._views.get(image)
        if views is None:
            if image.nbytes != self.description.nbytes:
                raise ImageError(f"{image.path} has {image.nbytes} bytes; the state needs {self.description.nbytes}")
            views = self._views[image] = image_views(image, self.description)
        image.begin(step)
        if views:
            torch._foreach_copy_(views, self._sources)
        image.finish(step)


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
