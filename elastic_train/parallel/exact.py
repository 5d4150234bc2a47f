"""``training.determinism: exact``: sums of gradients whose bits do not depend on who adds what in which order.

Floating-point addition is not associative, so the usual remedy is to fix its order, which costs a gather of every
micro-batch's gradient. Addition of integers *is* associative: here each slot's gradient of each use of a weight is
rounded to a multiple of ``2**-BITS`` before anything is added to it, and only integers are added, on a rank and between
ranks. What remains is that a slot is computed with the same shapes on every layout, which a micro-batch is anyway.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from elastic_train.parallel.data import DataParallel
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.parallel.shard import chunk_bounds, cuts_of, local_box
from elastic_train.parallel.stages import Stages, state_name
from elastic_train.parallel.tensor import tensor_dim

BITS = 44
"""A gradient is kept to 2**-44 = 5.7e-14 (it is a part of the mean over the tokens of the step)."""
LARGEST = 2.0 ** (51 - BITS)
"""128: an element of one slot's gradient must be smaller than this."""
SUM_BITS = 62 - BITS
"""Sums must stay below 2**18 in size: half of what 64 bits hold."""
CHUNK = 1 << 16
"""Elements converted at a time on a CPU: three operations on them run in its cache."""
BUCKET = 1 << 22
"""Elements that ranks exchange at a time (32 MiB), or one parameter: also the memory that an exchange needs."""

# A double between 256 and 512 has a last bit worth 2**-44. Adding a gradient to 384 in double precision therefore
# rounds it to that grid, and the bits of the result are those of 384 plus the wanted integer: one addition instead of
# a multiplication, a rounding and a conversion.
_ANCHOR = 1.5 * 2.0 ** (52 - BITS)
(_ANCHOR_BITS,) = struct.unpack("<q", struct.pack("<d", _ANCHOR))


class ExactGradients:
    """Catches every gradient on its way to a parameter, and adds it up in 64-bit fixed point.

    No parameter ever gets a gradient, so that neither FSDP2 nor the buckets of ``ddp`` reduce anything. Memory: 8 bytes
    per parameter of the stage (after tensor parallelism), whatever the sharding.
    """

    def __init__(self, stages: Stages, data: DataParallel, mesh: ParallelMesh, *, slots: int) -> None:
        """``slots``: of the global batch. ``data.trained`` says which part of each sum this rank needs."""
        self._mesh = mesh
        self._shards, self._cut = data.trained, data.shards_are_cut
        # What tensor parallelism leaves of each parameter is cut in dim 0.
        shapes = {name: _whole_shape(name, stages, mesh) for name in data.trained}
        self._buckets = _buckets(shapes, mesh.layout.shards if self._cut else 1, mesh.device)
        self._sums = {name: total for bucket in self._buckets for name, total in bucket.sums.items()}
        self._stages = [_Stage() for _ in stages.modules]
        for stage, module in zip(self._stages, stages.modules, strict=True):
            module.register_forward_pre_hook(stage.begin_micro_batch)
            for path, owner in module.named_modules():
                sums = {
                    attribute: self._sums[state_name(module, f"{path}.{attribute}")]
                    for attribute, parameter in owner._parameters.items()
                    if parameter is not None and parameter.requires_grad
                }
                if sums:
                    _catch(owner, sums, stage)
        # A weight is used twice at most. The bound must not depend on who holds what, or layouts would differ.
        summands = 2 * slots * mesh.layout.cp * mesh.layout.tp
        self._limit = min(LARGEST, 2.0 ** (SUM_BITS - math.ceil(math.log2(summands))))

    def start_step(self, slots: int) -> None:
        """``slots``: micro-batches of this rank in this step that are not padding; they come first."""
        for stage in self._stages:
            stage.start_step(slots)
        for total in self._sums.values():
            total.start_step(slots)

    @torch.no_grad()
    def sums(self) -> dict[str, Tensor]:
        """After all backward passes: int64 sums over all ranks that see different tokens, this rank's part of each.

        In units of 2**-BITS, each of the shape of the shard. Raises RuntimeError for a parameter that took no part.
        """
        for name, total in self._sums.items():
            if total.missing:
                raise RuntimeError(f"parameter {name} took no part in the step: {total.missing} gradients are missing")
        parts: dict[str, Tensor] = {}
        for bucket in self._buckets:
            widths = [total.width for total in bucket.sums.values()]
            parts |= zip(bucket.sums, torch.split(self._reduce(bucket.packed), widths), strict=True)
        return {
            name: parts[name][: shard.tensor.numel()].view(shard.tensor.shape) for name, shard in self._shards.items()
        }

    def _reduce(self, packed: Tensor) -> Tensor:
        """Row of this shard, summed over all ranks that see different tokens. ``packed``: [shards, elements]."""
        layout = self._mesh.layout
        mine = packed[0]
        if len(packed) > 1:
            # Gloo's reduce-scatter of integers took three times the CPU time of this.
            received = torch.empty_like(packed)
            dist.all_to_all_single(received, packed, group=self._mesh.shard_group)
            mine = received.sum(0)
        if not self._cut and layout.data_ranks * layout.cp > 1:
            dist.all_reduce(mine, group=self._mesh.batch_group)
        elif self._cut and layout.dp_replicate > 1:
            dist.all_reduce(mine, group=self._mesh.replicate_group)
        return mine

    @property
    def out_of_range(self) -> bool:
        """Whether this rank caught a gradient in this step that is not finite, or too large: its sums mean nothing."""
        extremes = [value for total in self._sums.values() for value in total.extremes]
        # Negated, so that NaN is out of range.
        return not bool((torch.stack(extremes).abs() < self._limit).all())


def from_fixed_point(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """float32 gradients from int64 sums in units of 2**-BITS: rounded to double, then to single precision."""
    return {name: total.double().mul_(2.0**-BITS).float() for name, total in sums.items()}


class _Stage:
    """Counts the micro-batches that a stage has begun: padding comes last, and its gradients are left out."""

    def __init__(self) -> None:
        self._begun = self._slots = 0

    def start_step(self, slots: int) -> None:
        self._begun, self._slots = 0, slots

    def begin_micro_batch(self, module: nn.Module, arguments: Any) -> None:
        self._begun += torch.is_grad_enabled()

    @property
    def in_slot(self) -> bool:
        return self._begun <= self._slots


class FixedPointSum:
    """The sum of one parameter's gradients on this rank. ``columns``: int64 [shards, elements of the largest shard]."""

    def __init__(self, columns: Tensor, shape: tuple[int, ...]) -> None:
        """``shape``: of a gradient; its rows are cut among the shards as ``torch.chunk`` does."""
        self._columns = columns
        self.width = columns.shape[1]
        self.uses = 0
        """How often a forward pass uses the parameter: twice if embedding and head are one."""
        self.missing = 0
        self.extremes: list[Tensor] = []
        parts, row = columns.shape[0], math.prod(shape[1:])
        bounds = [chunk_bounds(shape[0], parts, index) for index in range(parts)]
        self._parts = [columns[index, : (end - start) * row] for index, (start, end) in enumerate(bounds)]
        self._lengths = [part.numel() for part in self._parts]

    def start_step(self, slots: int) -> None:
        self.missing = slots * self.uses
        self.extremes.clear()
        # Each gradient comes with the bits of the anchor on top; together they wrap around to zero.
        start = -self.missing * _ANCHOR_BITS % 2**64
        self._columns.fill_(start - 2**64 if start >= 2**63 else start)

    def add(self, gradient: Tensor) -> None:
        """``gradient``: of one slot and one use, float32 or narrower, of the shape of the whole parameter."""
        self.missing -= 1
        if gradient.numel() == 0:
            return
        self.extremes.extend(torch.aminmax(gradient))
        for total, part in zip(self._parts, torch.split(gradient.reshape(-1), self._lengths), strict=True):
            if total.device.type == "cpu":
                _add_in_cache(total.numpy(), part.float().numpy())
            else:
                total.add_(part.double().add_(_ANCHOR).view(torch.int64))


def _add_in_cache(total: NDArray[np.int64], gradient: NDArray[np.float32]) -> None:
    """NumPy: torch multiplies integers by a factor before it adds them, and takes longer to start on small tensors."""
    rounded = np.empty(min(CHUNK, len(total)))
    integers = rounded.view(np.int64)
    for start in range(0, len(total), CHUNK):
        sums = total[start : start + CHUNK]
        values = rounded[: len(sums)]
        np.copyto(values, gradient[start : start + CHUNK])
        np.add(values, _ANCHOR, out=values)
        np.add(sums, integers[: len(sums)], out=sums)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Sums that travel together. ``packed``: int64 [shards, elements], as an exchange takes it: nothing is copied."""

    packed: Tensor
    sums: dict[str, FixedPointSum]


def _buckets(shapes: dict[str, tuple[int, ...]], parts: int, device: torch.device) -> list[_Bucket]:
    """Consecutive parameters together, up to BUCKET elements; ``parts``: shards of each."""
    # The first part of a parameter is the largest.
    widths = {name: chunk_bounds(shape[0], parts, 0)[1] * math.prod(shape[1:]) for name, shape in shapes.items()}
    groups: list[list[str]] = [[]]
    for name, width in widths.items():
        if groups[-1] and parts * (width + sum(widths[other] for other in groups[-1])) > BUCKET:
            groups.append([])
        groups[-1].append(name)
    buckets = []
    for names in groups:
        packed = torch.empty(parts, sum(widths[name] for name in names), dtype=torch.int64, device=device)
        columns = torch.split(packed, [widths[name] for name in names], dim=1)
        sums = {name: FixedPointSum(part, shapes[name]) for name, part in zip(names, columns, strict=True)}
        buckets.append(_Bucket(packed, sums))
    return buckets


class _Catch(torch.autograd.Function):
    """The parameter itself; its gradient ends here."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, total: FixedPointSum, counts: bool) -> Tensor:
        ctx.total, ctx.counts = total, counts
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        if ctx.counts:
            ctx.total.add(gradient)
        return None, None, None


def _catch(owner: nn.Module, sums: dict[str, FixedPointSum], stage: _Stage) -> None:
    """While ``owner`` computes, its parameters are what ``_Catch`` returns for them."""
    for total in sums.values():
        total.uses += 1

    def cover(module: nn.Module, arguments: Any) -> None:
        if torch.is_grad_enabled():
            for attribute, total in sums.items():
                parameter = module._parameters[attribute]
                assert parameter is not None
                # Detached: hooks on the parameter would be called, even without a gradient.
                leaf = parameter.detach().requires_grad_()
                module.__dict__[attribute] = _Catch.apply(leaf, total, stage.in_slot)  # type: ignore[no-untyped-call]

    def uncover(module: nn.Module, arguments: Any, output: Any) -> None:
        for attribute in sums:
            module.__dict__.pop(attribute, None)

    owner.register_forward_pre_hook(cover)
    # Recomputation leaves a module by an exception as soon as it has what it needs.
    owner.register_forward_hook(uncover, always_call=True)


def _whole_shape(name: str, stages: Stages, mesh: ParallelMesh) -> tuple[int, ...]:
    """What tensor parallelism leaves of a parameter, not sharded: the shape of its gradient."""
    return local_box(stages.shapes[name], cuts_of(tensor_dim(name), mesh.layout, mesh.place, sharded=False)).sizes
