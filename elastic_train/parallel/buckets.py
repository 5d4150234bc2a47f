"""Gradients of weights that every rank holds whole: collected as they arrive, reduced a bucket at a time.

A bucket is the parameters of one block, or all others of a stage. Autograd leaves each gradient in ``.grad``, in the
dtype of the weight; the bucket takes it from there as soon as it is complete.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_train.parallel.collectives import all_gather_single, reduce_scatter_single
from elastic_train.parallel.shard import chunk_bounds


@dataclass(frozen=True)
class Member:
    """A parameter of a bucket. ``backwards``: how many backward passes of a step bring it a gradient."""

    name: str
    parameter: nn.Parameter
    backwards: int


class Cut:
    """How the ranks of ``group`` cut the tensors of a bucket: dim 0, in ``torch.chunk``'s parts.

    Collectives want equal parts: a bucket becomes a matrix with one row per rank, in which each tensor has the columns
    of its largest part. Where sizes do not divide, the ends of the last rows are padding.
    """

    def __init__(self, members: list[Member], group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._members = members
        self._widths = [
            chunk_bounds(len(member.parameter), self.ranks, 0)[1] * member.parameter[:1].numel() for member in members
        ]
        self.width = sum(self._widths)

    def own(self, member: Member, whole: Tensor) -> Tensor:
        """The part of ``whole`` (shaped as the parameter) that this rank keeps: a view."""
        start, end = chunk_bounds(len(member.parameter), self.ranks, self.rank)
        return whole[start:end]

    def own_views(self, row: Tensor) -> dict[str, Tensor]:
        """This rank's parts as views of its ``row`` of the matrix."""
        columns = torch.split(row, self._widths)
        parts = [self.own(member, member.parameter) for member in self._members]
        return {
            member.name: column[: part.numel()].view(part.shape)
            for member, column, part in zip(self._members, columns, parts, strict=True)
        }

    def cells(self, matrix: Tensor, wholes: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of views that hold the same elements: in ``matrix``, and in the contiguous ``wholes``."""
        for columns, whole, width in zip(torch.split(matrix, self._widths, dim=1), wholes, self._widths, strict=True):
            if width == 0:
                continue
            flat = whole.view(-1)
            rows, rest = divmod(flat.numel(), width)
            yield columns[:rows], flat[: rows * width].view(rows, width)
            if rest:
                yield columns[rows, :rest], flat[rows * width :]


class Bucket(ABC):
    """Collects the gradients of its members during a step. ``finish`` gives them, summed over ranks, by name."""

    def __init__(self, members: list[Member]) -> None:
        self._members = members
        self._seen: set[str] = set()
        for member in members:
            member.parameter.register_post_accumulate_grad_hook(self._hook(member))  # type: ignore[no-untyped-call]

    def start(self) -> None:
        """Forget the step before."""
        self._seen.clear()
        for member in self._members:
            member.parameter.grad = None

    @torch.no_grad()
    def finish(self) -> dict[str, Tensor]:
        """Reduce what is not yet under way, and wait for it. Raises RuntimeError for a parameter without a gradient."""
        # A backward pass that torch splits in two (zero bubble) calls no hook: such gradients are still in ``.grad``.
        missing = [m.name for m in self._members if m.name not in self._seen and m.parameter.grad is None]
        if missing:
            raise RuntimeError(f"parameter {', '.join(missing)} took no part in the step: it has no gradient")
        return self._finish()

    def _hook(self, member: Member) -> Callable[[Tensor], None]:
        @torch.no_grad()
        def arrived(parameter: Tensor) -> None:
            self._take(member)
            self._seen.add(member.name)

        return arrived

    @abstractmethod
    def _take(self, member: Member) -> None:
        """The gradient of one backward pass is in ``.grad``."""

    @abstractmethod
    def _finish(self) -> dict[str, Tensor]: ...


class WholeBucket(Bucket):
    """Keeps whole gradients in one buffer, and all-reduces it once per step, when the last gradient has arrived.

    ``group`` None: nobody to reduce with. With ``cut`` only this rank's parts are given out.
    """

    def __init__(
        self, members: list[Member], dtype: torch.dtype, group: dist.ProcessGroup | None, cut: Cut | None
    ) -> None:
        super().__init__(members)
        self._group = group
        sizes = [member.parameter.numel() for member in members]
        self._buffer = torch.zeros(sum(sizes), dtype=dtype, device=members[0].parameter.device)
        pieces = zip(members, torch.split(self._buffer, sizes), strict=True)
        self._views = {member.name: piece.view(member.parameter.shape) for member, piece in pieces}
        self._given = {m.name: cut.own(m, self._views[m.name]) if cut else self._views[m.name] for m in members}
        self._missing_backwards = 0
        self._reducing = False
        self._work: dist.Work | None = None

    def start(self) -> None:
        super().start()
        self._missing_backwards = sum(member.backwards for member in self._members)
        self._reducing = False

    def _take(self, member: Member) -> None:
        gradient, view = member.parameter.grad, self._views[member.name]
        if self._reducing or gradient is None:
            raise RuntimeError(f"parameter {member.name} got a gradient after its bucket was reduced")
        if member.name in self._seen:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        member.parameter.grad = None
        self._missing_backwards -= 1
        if self._missing_backwards == 0:
            self._reduce()

    def _reduce(self) -> None:
        self._reducing = True
        if self._group is not None:
            self._work = dist.all_reduce(self._buffer, group=self._group, async_op=True)

    def _finish(self) -> dict[str, Tensor]:
        for member in self._members:
            if member.parameter.grad is not None:
                self._take(member)
        if not self._reducing:
            self._reduce()
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._given


class Scattering:
    """Reduce-scatters under way, over all buckets of a rank: at most ``LIMIT``, as each holds a bucket's gradients."""

    LIMIT = 2

    def __init__(self) -> None:
        self._pending: deque[tuple[dist.Work, Tensor, Tensor, ShardedBucket]] = deque()

    def add(self, work: dist.Work, matrix: Tensor, row: Tensor, bucket: ShardedBucket) -> None:
        self._pending.append((work, matrix, row, bucket))

    def settle(self, limit: int) -> None:
        """Wait until at most ``limit`` are under way."""
        while len(self._pending) > limit:
            work, _, row, bucket = self._pending.popleft()
            work.wait()
            bucket.accumulate(row)


class ShardedBucket(Bucket):
    """Keeps this rank's part of the gradients: every backward pass ends in a reduce-scatter that is added to it.

    The whole gradients live from the backward pass of their block until they are scattered.
    ``replicas``: the group of ranks with the same part, over which it is summed once per step; None: there are none.
    """

    def __init__(
        self, members: list[Member], dtype: torch.dtype, cut: Cut, replicas: dist.ProcessGroup | None, under: Scattering
    ) -> None:
        super().__init__(members)
        self._cut, self._replicas, self._under = cut, replicas, under
        self._row = torch.zeros(cut.width, dtype=dtype, device=members[0].parameter.device)
        self._given = cut.own_views(self._row)
        self._empty = True

    def start(self) -> None:
        super().start()
        self._empty = True

    def accumulate(self, row: Tensor) -> None:
        """Add this rank's part of one backward pass."""
        if self._empty:
            self._row.copy_(row)
        else:
            self._row.add_(row)
        self._empty = False

    def _take(self, member: Member) -> None:
        if all(other.parameter.grad is not None for other in self._members):
            self._scatter()

    def _scatter(self) -> None:
        self._under.settle(Scattering.LIMIT - 1)
        matrix = self._row.new_empty(self._cut.ranks, self._cut.width)
        gradients = [_gradient(member.parameter) for member in self._members]
        targets, sources = zip(*self._cut.cells(matrix, gradients), strict=True)
        torch._foreach_copy_(targets, sources)
        for member in self._members:
            if member.parameter.grad is not None:
                # No hook tells of those whose backward pass was split, as the head's where the embedding's was not.
                self._seen.add(member.name)
            member.parameter.grad = None
        row = torch.empty_like(self._row)
        work = reduce_scatter_single(row, matrix.view(-1), group=self._cut.group, async_op=True)
        self._under.add(work, matrix, row, self)

    def _finish(self) -> dict[str, Tensor]:
        if any(member.parameter.grad is not None for member in self._members):
            self._scatter()
        self._under.settle(0)
        if self._replicas is not None:
            dist.all_reduce(self._row, group=self._replicas)
        return self._given


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Zeros where a backward pass brought none, as when a parameter is used twice and its bucket's others once."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()


def gather_weights(buckets: list[tuple[Cut, list[Tensor], list[Tensor]]], dtype: torch.dtype) -> None:
    """Write whole weights from the parts of all ranks, one all-gather per bucket, two under way at a time.

    Per bucket: its cut, this rank's parts, and the contiguous whole tensors to write. ``dtype``: of the exchange.
    """
    pending: deque[tuple[dist.Work, Cut, Tensor, list[Tensor]]] = deque()

    def settle(limit: int) -> None:
        while len(pending) > limit:
            work, cut, matrix, wholes = pending.popleft()
            work.wait()
            sources, targets = zip(*cut.cells(matrix, wholes), strict=True)
            torch._foreach_copy_(targets, sources)

    for cut, parts, wholes in buckets:
        settle(1)
        row = torch.empty(cut.width, dtype=dtype, device=wholes[0].device)
        torch._foreach_copy_(list(cut.own_views(row).values()), parts)
        matrix = row.new_empty(cut.ranks, cut.width)
        pending.append((all_gather_single(matrix.view(-1), row, group=cut.group, async_op=True), cut, matrix, wholes))
    settle(0)
