"""Whole matrices out of their parts, dealt out to the ranks that hold parts of them, and the results cut again.

For computations that are not elementwise, such as Muon's. The ranks of a pipeline stage take the matrices in rounds,
one each: a rank holds one whole matrix at a time, and no matrix is computed twice, not even on replicas. A round sends
every element to the matrix' owner once (one all-to-all), and from there to every rank that holds it (a second one).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.parallel.shard import Box, cuts_of, local_box
from elastic_train.parallel.tensor import tensor_dim


class WholeMatrices:
    """The exchange for one set of matrices. All ranks of the mesh make it at the same place of the program."""

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], mesh: ParallelMesh, *, dtype: torch.dtype, sharded: bool
    ) -> None:
        """``shapes``: name -> global shape, the same names on all ranks of a stage. ``dtype``: in which parts travel.

        ``sharded``: whether parts are cut over ``dp_shard`` x ``cp``.
        """
        self._group, self._dtype, self._device = mesh.stage_group, dtype, mesh.device
        self._size, self._index = dist.get_world_size(self._group), dist.get_rank(self._group)
        self._shapes = shapes
        self._boxes = _boxes_of(shapes, mesh, self._size, sharded)
        # Largest first: the matrices of a round are of one size, so that its ranks are done together.
        names = sorted(shapes, key=lambda name: (-math.prod(shapes[name]), name))
        self._rounds = [names[start : start + self._size] for start in range(0, len(names), self._size)]
        self._senders = {
            name: _senders(self._boxes[name], owner) for names in self._rounds for owner, name in enumerate(names)
        }

    def map(self, part: Callable[[str], Tensor], function: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(name, this rank's part of ``function(matrix)``) of every matrix, in ``dtype``.

        ``part`` gives this rank's part by name; ``function`` keeps the shape. Every rank runs the iterator to its end.
        """
        for names in self._rounds:
            whole = self._assemble(names, {name: part(name) for name in names})
            yield from self._cut(names, None if whole is None else function(whole))

    def _assemble(self, names: list[str], parts: dict[str, Tensor]) -> Tensor | None:
        """The matrix of ``names`` that this rank owns: number ``index``; None when there are fewer."""
        out_sizes = [parts[name].numel() if self._index in self._senders[name] else 0 for name in names]
        sent = [self._flat(parts[name]) for name, size in zip(names, out_sizes, strict=True) if size]
        flat = torch.cat([self._empty(0), *sent])
        out_sizes += [0] * (self._size - len(names))
        if self._index >= len(names):
            self._exchange(flat, out_sizes, [0] * self._size)
            return None
        name = names[self._index]
        boxes, senders = self._boxes[name], self._senders[name]
        in_sizes = [math.prod(box.sizes) if rank in senders else 0 for rank, box in enumerate(boxes)]
        received = self._exchange(flat, out_sizes, in_sizes)
        whole = self._empty(*self._shapes[name])
        for rank in senders:
            _region(whole, boxes[rank]).copy_(received[rank].view(boxes[rank].sizes))
        return whole

    def _cut(self, names: list[str], whole: Tensor | None) -> Iterator[tuple[str, Tensor]]:
        """Every rank's part of every result, from its owner."""
        flat, out_sizes = self._empty(0), [0] * self._size
        if whole is not None:
            pieces = [self._flat(_region(whole, box)) for box in self._boxes[names[self._index]]]
            flat, out_sizes = torch.cat(pieces), [piece.numel() for piece in pieces]
        own = [self._boxes[name][self._index].sizes for name in names]
        in_sizes = [math.prod(sizes) for sizes in own] + [0] * (self._size - len(names))
        received = self._exchange(flat, out_sizes, in_sizes)
        for name, sizes, piece in zip(names, own, received, strict=False):
            yield name, piece.view(sizes)

    def _exchange(self, flat: Tensor, out_sizes: list[int], in_sizes: list[int]) -> tuple[Tensor, ...]:
        if self._size == 1:
            return (flat,)
        received = self._empty(sum(in_sizes))
        dist.all_to_all_single(received, flat, in_sizes, out_sizes, group=self._group)
        return torch.split(received, in_sizes)

    def _flat(self, part: Tensor) -> Tensor:
        return part.to(self._dtype).reshape(-1)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self._dtype, device=self._device)


def _boxes_of(
    shapes: dict[str, tuple[int, ...]], mesh: ParallelMesh, ranks: int, sharded: bool
) -> dict[str, list[Box]]:
    """The part of every rank of this pipeline stage, in the order of ``mesh.stage_group``."""
    places = [mesh.layout.coordinates(mesh.place.pp * ranks + index) for index in range(ranks)]
    known: dict[tuple[tuple[int, ...], int | None], list[Box]] = {}  # most matrices are of a few kinds
    for name, shape in shapes.items():
        kind = shape, tensor_dim(name)
        if kind not in known:
            known[kind] = [local_box(shape, cuts_of(kind[1], mesh.layout, at, sharded=sharded)) for at in places]
    return {name: known[shape, tensor_dim(name)] for name, shape in shapes.items()}


def _senders(boxes: list[Box], owner: int) -> list[int]:
    """One rank for every part that holds anything, the owner itself where it can."""
    senders: dict[Box, int] = {}
    for distance in range(len(boxes)):
        rank = (owner + distance) % len(boxes)
        if math.prod(boxes[rank].sizes):
            senders.setdefault(boxes[rank], rank)
    return sorted(senders.values())


def _region(whole: Tensor, box: Box) -> Tensor:
    return whole[tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))]
