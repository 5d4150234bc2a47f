"""The device mesh of a layout: one object owns it and is passed along, so that two layouts can live in one process."""

from __future__ import annotations

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
        self._data = self._mesh["dp_replicate", "dp_shard"]._flatten("dp") if layout.data_ranks > 1 else None

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        return self._mesh.get_group("tp")

    @property
    def fsdp(self) -> DeviceMesh:
        """What ``fully_shard`` takes: (dp_replicate, dp_shard), or only dp_shard when nothing is replicated."""
        return self._mesh["dp_replicate", "dp_shard"] if self.layout.dp_replicate > 1 else self._mesh["dp_shard"]

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that read different samples and otherwise have the same place; None if there is only one."""
        return None if self._data is None else self._data.get_group()

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        return self._mesh.get_group("pp")
