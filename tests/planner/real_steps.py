"""What the ranks of the planner's tests do: real steps of the engine, watched."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.planner.schedule import Kind, Pass
from elastic_train.training.engine import Engine
from tests.training.synthetic import SyntheticBatches


def passes_of_a_step(rank: int, jobs: list[Job], layout: Layout) -> list[list[Pass]]:
    """The passes that this rank makes in a step of every job, in their order."""
    return [_passes(rank, job, layout) for job in jobs]


def _passes(rank: int, job: Job, layout: Layout) -> list[Pass]:
    engine = Engine(job, layout, rank, SyntheticBatches(job))
    engine.initialize()
    passes: list[Pass] = []

    def watch(name: str, kind: Kind) -> Any:
        original = getattr(PipelineStage, name)

        def run(stage: PipelineStage, micro_batch: int, *arguments: Any, **keywords: Any) -> Any:
            passes.append(Pass(kind, stage.stage_index, micro_batch))
            return original(stage, micro_batch, *arguments, **keywords)

        return mock.patch.object(PipelineStage, name, run)

    with (
        watch("forward_one_chunk", "F"),
        watch("backward_one_chunk", "B"),
        watch("backward_weight_one_chunk", "W"),
    ):
        engine.train_step(1)
    return passes


Carried = tuple[tuple[int, ...], str, str]
"""Ranks of the group (of a send: of this rank's pipeline), collective, dtype."""

COLLECTIVES = {
    # torch's operator -> name, and which argument is the payload
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
}
IGNORED = ("recv_", "barrier")


class Bytes(TorchDispatchMode):
    """Counts what all collectives carry. Raises for one that it does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[Carried] = Counter()
        self.payload: Counter[Carried] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._add(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))

    def _add(self, operator: str, arguments: Any) -> None:
        if operator in IGNORED:
            return
        name, place = COLLECTIVES[operator]
        payload = arguments[place]
        tensors = payload if isinstance(payload, list) else [payload]
        if name == "send" and tensors[0].numel() == 1:
            return  # neighbours of a pipeline greet each other, once
        group = next(each for each in arguments if isinstance(each, torch.ScriptObject))
        name_of_group = dist.ProcessGroup.unbox(group).group_name
        ranks = dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(name_of_group))
        key = tuple(sorted(ranks)), name, str(tensors[0].dtype).removeprefix("torch.")
        self.count[key] += 1
        self.payload[key] += sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def carried_by_a_step(rank: int, cases: list[tuple[Job, Layout]]) -> list[dict[Carried, tuple[int, int]]]:
    """How many collectives of each kind this rank takes part in during a step of every case, and their bytes."""
    found = []
    for job, layout in cases:
        engine = Engine(job, layout, rank, SyntheticBatches(job))
        engine.initialize()
        with Bytes() as carried:
            engine.train_step(1)
        found.append({key: (carried.count[key], carried.payload[key]) for key in carried.count if len(key[0]) > 1})
    return found
