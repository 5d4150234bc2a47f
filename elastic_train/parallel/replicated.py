"""``ddp``, ``zero1`` and ``zero2``: every rank holds all weights of its stage, in the precision of compute.

What is shared out: nothing (``ddp``), master weights and moments (``zero1``), gradients too (``zero2``). The parts are
those of FSDP2, so that snapshots and checkpoints are the same for all strategies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_train.config.job import Job
from elastic_train.parallel.buckets import Bucket, Cut, Member, Scattering, ShardedBucket, WholeBucket, gather_weights
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.parallel.precision import compute_dtype, reduce_dtype
from elastic_train.parallel.shard import LocalShard, cuts_of, local_box
from elastic_train.parallel.stages import Stages
from elastic_train.parallel.tensor import tensor_dim
from elastic_train.planner.constraints import micro_batches_per_rank


class Replicated:
    """Also what ``zero3`` and ``hsdp`` become on a rank without data peers.

    In float32 the master weights are the weights (a view of this rank's part, where they are cut). In a narrower
    precision they are a float32 copy, from which ``publish`` writes the weights; frozen ones have none.
    """

    def __init__(self, stages: Stages, job: Job, mesh: ParallelMesh) -> None:
        self._dtype = compute_dtype(job.training)
        for module in stages.modules:
            module.to(self._dtype).to_empty(device=mesh.device)
            module.tie()
        self.shards_are_cut = job.parallel.data in ("zero1", "zero2") and mesh.layout.shards > 1
        groups = list(_bucket_members(stages, micro_batches_per_rank(job, mesh.layout)))
        cutting = mesh.shard_group if self.shards_are_cut else None
        self._trained, self._frozen = (_Held.of(groups, trained, cutting) for trained in (True, False))
        # Exact sums catch every gradient before it gets to a parameter.
        caught = job.training.determinism == "exact"
        self._buckets = [] if caught else _buckets(self._trained, job, mesh)
        self.trained = {m.name: self._shard(m, held.cut, stages, mesh) for held in self._trained for m in held.members}
        frozen = {m.name: self._shard(m, held.cut, stages, mesh) for held in self._frozen for m in held.members}
        self.shards = self.trained | frozen

    def _shard(self, member: Member, cut: Cut | None, stages: Stages, mesh: ParallelMesh) -> LocalShard:
        whole, shape = member.parameter.detach(), stages.shapes[member.name]
        part = whole if cut is None else cut.own(member, whole)
        if member.parameter.requires_grad and self._dtype != torch.float32:
            part = torch.empty_like(part, dtype=torch.float32)
        cuts = cuts_of(tensor_dim(member.name), mesh.layout, mesh.place, sharded=self.shards_are_cut)
        return LocalShard(part, shape, local_box(shape, cuts).offsets)

    def start_step(self) -> None:
        for bucket in self._buckets:
            bucket.start()

    def before_backward(self, last: bool) -> None:
        """Nothing to do: buckets count the gradients that arrive."""

    def gradients(self) -> dict[str, Tensor]:
        return {name: gradient for bucket in self._buckets for name, gradient in bucket.finish().items()}

    @torch.no_grad()
    def publish(self, *, frozen: bool = True) -> None:
        """Cast the master weights to the precision of compute, and gather them where they are cut."""
        gathered = []
        for held in self._trained + (self._frozen if frozen else []):
            masters = [self.shards[member.name].tensor for member in held.members]
            weights = [member.parameter.detach() for member in held.members]
            if held.cut is not None:
                gathered.append((held.cut, masters, weights))
            elif masters[0].dtype != self._dtype:
                torch._foreach_copy_(weights, masters)
        gather_weights(gathered, self._dtype)

    def release(self) -> None:
        """Nothing to do: nothing is gathered."""


@dataclass(frozen=True)
class _Held:
    """Parameters of one block, or those outside of blocks, that are trained, or that are not. ``cut``: if they are."""

    members: list[Member]
    cut: Cut | None

    @classmethod
    def of(cls, groups: list[list[Member]], trained: bool, group: dist.ProcessGroup | None) -> list[_Held]:
        """Those of ``groups`` that are ``trained`` or not, cut over the ranks of ``group``."""
        found = [[member for member in members if member.parameter.requires_grad == trained] for members in groups]
        return [cls(members, None if group is None else Cut(members, group)) for members in found if members]


def _bucket_members(stages: Stages, micro_batches: int) -> Iterator[list[Member]]:
    """One bucket per block in the order of the backward pass, then one of everything else."""
    uses = Counter(id(parameter) for module in stages.modules for parameter in module.parameters())
    members = {
        id(parameter): Member(name, parameter, uses[id(parameter)] * micro_batches)
        for name, parameter in stages.named_parameters()
    }
    for _, block in reversed(list(stages.blocks())):
        yield [members.pop(id(parameter)) for parameter in block.parameters()]
    if members:
        yield list(members.values())


def _buckets(trained: list[_Held], job: Job, mesh: ParallelMesh) -> list[Bucket]:
    dtype, layout = reduce_dtype(job.training), mesh.layout
    alone = layout.dp_replicate * layout.shards == 1
    under = Scattering()
    buckets: list[Bucket] = []
    for held in trained:
        if job.parallel.data == "zero2" and held.cut is not None:
            replicas = mesh.replicate_group if layout.dp_replicate > 1 else None
            buckets.append(ShardedBucket(held.members, dtype, held.cut, replicas, under))
        else:
            buckets.append(WholeBucket(held.members, dtype, None if alone else mesh.batch_group, held.cut))
    return buckets
