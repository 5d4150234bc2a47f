"""What the ranks of the planner's tests do: real steps of the engine, watched."""

from __future__ import annotations

from typing import Any
from unittest import mock

from torch.distributed.pipelining import PipelineStage

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
