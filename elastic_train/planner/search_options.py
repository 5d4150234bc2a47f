"""What a search for a layout decides: a mesh, and the ways to run it.

A ``Mesh`` is the sizes of the axes that cut the model and of the data axis as a whole; how the data ranks share the
state (``Sharing``), the ``Schedule``, the micro-batch and what is recomputed are its options.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from elastic_train.config.layout import Layout

CONTEXTS = ("gather", "ulysses")
"""``context`` that compete; of equally fast ones the first wins."""
SHARING = (
    ("ddp", False),
    ("zero1", False),
    ("zero2", False),
    ("zero3", False),
    ("hsdp", False),
    ("zero3", True),
    ("hsdp", True),
)
"""``data`` and ``reshard_after_forward`` that compete; of equally fast ones the first wins."""
RECOMPUTE = ("none", "selective", "full")
"""Each keeps no more and takes no less time than the one before."""


class Schedule(NamedTuple):
    """How passes run, along pp and along cp: fields of ``parallel``."""

    pipeline: str = "1f1b"
    virtual_stages: int = 2
    context: str = "gather"

    @property
    def splits_backward(self) -> bool:
        return self.pipeline in ("zero_bubble", "zbv")

    @property
    def stages_per_rank(self) -> int:
        return 1 if self.pipeline in ("1f1b", "gpipe") else self.virtual_stages


SCHEDULES = tuple(Schedule(name) for name in ("1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "gpipe"))
"""Those that compete, but for ``context``; of equally fast ones the first wins."""


@dataclass(frozen=True, slots=True, order=True)
class Mesh:
    """Sizes of the axes; how the data ranks are cut into replicas and shards is left open."""

    tp: int
    pp: int
    cp: int
    data_ranks: int

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.data_ranks

    def __str__(self) -> str:
        """Axes larger than one, the data axis as ``dp``; ``single`` when there is none."""
        sizes = {"pp": self.pp, "dp": self.data_ranks, "cp": self.cp, "tp": self.tp}
        return " x ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "single"


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the data ranks share weights, gradients and optimizer state."""

    data: str
    reshard_after_forward: bool
    dp_replicate: int
    dp_shard: int


def sharing_layout(mesh: Mesh, sharing: Sharing) -> Layout:
    """``mesh`` with its data ranks cut as ``sharing`` says."""
    return Layout(mesh.pp, sharing.dp_replicate, sharing.dp_shard, mesh.cp, mesh.tp)
