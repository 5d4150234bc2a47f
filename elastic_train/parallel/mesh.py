"""The device mesh of a layout: one object owns it and is passed along, so that two layouts can live in one process."""

from __future__ import annotations

from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from elastic_train.config.layout import AXES, Layout


class ParallelMesh:
    """Process groups along every axis of ``layout``, and this rank's place among them.

    The process group must be initialised with ``layout.world_size`` ranks.
    """

    def __init__(self, layout: Layout, rank: int, device: torch.device) -> None:
        world = dist.get_world_size()
        if world != layout.world_size:
            raise ValueError(f"layout {layout} needs {layout.world_size} ranks, the process group has {world}")
        self.layout = layout
        self.device = device
        self.place = layout.coordinates(rank)
        self.data_rank = layout.data_rank(rank)
        self._mesh = init_device_mesh(device.type, tuple(layout.as_dict().values()), mesh_dim_names=AXES)
        # Flattened in the same order on every rank, as each makes process groups.
        self._shard = self._flat(("dp_shard", "cp"), "shard")
        self._batch = self._flat(("dp_replicate", "dp_shard", "cp"), "batch")

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        return self._mesh.get_group("tp")

    @property
    def context_group(self) -> dist.ProcessGroup:
        return self._mesh.get_group("cp")

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        return self._mesh.get_group("pp")

    @property
    def replicate_group(self) -> dist.ProcessGroup:
        return self._mesh.get_group("dp_replicate")

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks among which sharded state is cut: those of ``dp_shard`` and ``cp``, in this order."""
        return self._shard.get_group()

    @property
    def batch_group(self) -> dist.ProcessGroup:
        """The ranks that see different tokens and otherwise have the same place: over both data axes and ``cp``."""
        return self._batch.get_group()

    @cached_property
    def stage_group(self) -> dist.ProcessGroup:
        """All ranks of this pipeline stage. Made when first asked for: all ranks do so at the same place, or none."""
        return self._flat(("dp_replicate", "dp_shard", "cp", "tp"), "stage").get_group()

    @cached_property
    def fsdp(self) -> DeviceMesh:
        """What ``fully_shard`` takes: (dp_replicate, shard), or only shard when nothing is replicated."""
        if self.layout.dp_replicate == 1:
            return self._shard
        return self._mesh["dp_replicate", "dp_shard"] if self.layout.cp == 1 else self._replicated_shards()

    def _flat(self, axes: tuple[str, ...], name: str) -> DeviceMesh:
        """The mesh over ``axes``, flattened; of one axis, where only that one is larger than 1: no group is made."""
        larger = [axis for axis in axes if getattr(self.layout, axis) > 1]
        return self._mesh[larger[0] if larger else axes[0]] if len(larger) <= 1 else self._mesh[axes]._flatten(name)

    def _replicated_shards(self) -> DeviceMesh:
        layout = self.layout
        shape = (layout.pp, layout.dp_replicate, layout.shards, layout.tp)
        names = ("pp", "dp_replicate", "shard", "tp")
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)["dp_replicate", "shard"]
