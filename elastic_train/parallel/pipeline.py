"""The ``pp`` axis: torch's pipeline schedules by name, over this rank's stages, and a forward-only run for evaluation.

The loss is divided by the global number of tokens before backward, so schedules must not divide again
(``scale_grads=False``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from elastic_train.config.job import Job
from elastic_train.model.transformer import Transformer
from elastic_train.parallel.batches import MicroBatches
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.parallel.precision import compute_dtype
from elastic_train.parallel.shard import chunk_bounds
from elastic_train.parallel.stages import Stages
from elastic_train.planner.stage_split import stages_of_rank, total_stages

Loss = Callable[[Tensor, Tensor], Tensor]
_ONE_STAGE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_SEVERAL_STAGES: dict[str, Any] = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class Pipeline:
    """Runs the micro-batches of a step through all stages and leaves reduced gradients in the parameters."""

    def __init__(self, stages: Stages, job: Job, mesh: ParallelMesh, *, micro_batches: int, loss: Loss) -> None:
        parallel, pp = job.parallel, mesh.layout.pp
        self._mesh, self._loss = mesh, loss
        numbers = stages_of_rank(parallel, pp, mesh.place.pp)
        self._stages = dict(zip(numbers, stages.modules, strict=True))
        self._last = total_stages(parallel, pp) - 1
        self._rank_of = {stage: rank for rank in range(pp) for stage in stages_of_rank(parallel, pp, rank)}
        self._shapes = _Shapes(job, mesh)
        parts = [self._torch_stage(number, module) for number, module in self._stages.items()]
        if parallel.pipeline in _ONE_STAGE:
            (part,) = parts
            build = partial(_ONE_STAGE[parallel.pipeline], part)
        else:
            build = partial(_SEVERAL_STAGES[parallel.pipeline], parts)
        self._schedule = build(micro_batches, loss_fn=loss, scale_grads=False)

    def run(self, batches: MicroBatches) -> list[Tensor]:
        """Forward and backward. Returns the losses of the micro-batches where the last stage is, else []."""
        losses: list[Tensor] = []
        documents: dict[str, Any] = (
            {} if batches.documents_MBS is None else {"documents_BS": batches.documents_MBS.flatten(0, 1)}
        )
        first, last = 0 in self._stages, self._last in self._stages
        self._schedule.step(
            *((batches.input_ids_MBT.flatten(0, 1),) if first else ()),
            target=batches.labels_MBT.flatten(0, 1) if last else None,
            losses=losses if last else None,
            return_outputs=False,
            **documents,
        )
        return [loss.detach() for loss in losses]

    @torch.no_grad()
    def evaluate(self, batches: MicroBatches) -> list[Tensor]:
        """Forward only, any number of micro-batches: the losses where the last stage is, else []. No gradients.

        Each micro-batch goes through all stages of a rank before the next one: every pair of ranks then sends and
        receives in the same order, whatever the placement of the stages. (torch's ``schedule.eval`` fails for ``zbv``,
        and takes the number of micro-batches of the training step only.)
        """
        group, place = self._mesh.pipeline_group, self._mesh.place.pp
        losses: list[Tensor] = []
        sent: list[tuple[Any, Tensor]] = []
        for index in range(len(batches)):
            x = batches.input_ids_MBT[index]
            for number, module in self._stages.items():
                if number and self._rank_of[number - 1] != place:
                    x = self._shapes.hidden(self._mesh.device)
                    dist.recv(x, group=group, group_src=self._rank_of[number - 1])
                x = module(x, None if batches.documents_MBS is None else batches.documents_MBS[index])
                if number == self._last:
                    losses.append(self._loss(x, batches.labels_MBT[index]))
                elif self._rank_of[number + 1] != place:
                    # Kept until it has been sent.
                    sent.append((dist.isend(x, group=group, group_dst=self._rank_of[number + 1]), x))
        for work, _ in sent:
            work.wait()
        return losses

    def _torch_stage(self, number: int, module: Transformer) -> PipelineStage:
        # Static shapes: without them torch sends pickled metadata between the stages and runs a trial step.
        hidden = self._shapes.hidden(torch.device("meta")).requires_grad_()
        return _Stage(
            module,
            number,
            self._last + 1,
            self._mesh.device,
            input_args=hidden if number else self._shapes.ids(),
            output_args=hidden if number < self._last else self._shapes.logits(),
            group=self._mesh.pipeline_group,
        )


class _Stage(PipelineStage):
    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """torch 2.11 also greets the next stage when it is on the same rank (``zbv``), which gloo cannot do."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]


class _Shapes:
    """What goes into stages and comes out of them, per micro-batch."""

    def __init__(self, job: Job, mesh: ParallelMesh) -> None:
        layout, model = mesh.layout, job.model
        batch, tokens = job.training.micro_batch, job.data.sequence_length // layout.cp
        start, end = chunk_bounds(model.vocab_size, layout.tp, mesh.place.tp)
        self._ids = (batch, tokens)
        self._hidden = (batch, tokens // layout.tp, model.hidden_size)
        self._logits = (batch, tokens, end - start)
        self._dtype = compute_dtype(job.training)

    def ids(self) -> Tensor:
        return torch.empty(self._ids, dtype=torch.int64, device="meta")

    def hidden(self, device: torch.device) -> Tensor:
        """What is sent from stage to stage: this rank's tokens, uninitialised."""
        return torch.empty(self._hidden, dtype=self._dtype, device=device)

    def logits(self) -> Tensor:
        return torch.empty(self._logits, dtype=self._dtype, device="meta", requires_grad=True)
