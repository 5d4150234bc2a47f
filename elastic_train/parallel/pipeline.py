"""The ``pp`` axis: which layers a stage holds, and the 1F1B schedule over torch's pipeline stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from elastic_train.config.job import Job
from elastic_train.parallel.batches import MicroBatches
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.parallel.precision import compute_dtype
from elastic_train.parallel.stages import Stages


def stage_layers(layers: int, stages: int, stage: int) -> range:
    """Contiguous, balanced split; the first ``layers % stages`` stages hold one more (the last one has the head)."""
    base, extra = divmod(layers, stages)
    start = stage * base + min(stage, extra)
    return range(start, start + base + (stage < extra))


class Pipeline:
    """Runs the micro-batches of a step through all stages and leaves reduced gradients in the parameters."""

    def __init__(
        self,
        stages: Stages,
        job: Job,
        mesh: ParallelMesh,
        *,
        micro_batches: int,
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        stage, layout = mesh.place.pp, mesh.layout
        (model,) = stages.modules
        self._model, self._mesh, self._loss = model, mesh, loss
        self._first, self._last = stage == 0, stage == layout.pp - 1
        # Static shapes: without them torch sends pickled metadata between the stages and runs a trial step.
        batch, tokens, dtype = (
            job.training.micro_batch,
            job.data.sequence_length // layout.cp,
            compute_dtype(job.training),
        )
        ids = torch.empty(batch, tokens, dtype=torch.int64, device="meta")
        hidden = _example(batch, tokens // layout.tp, job.model.hidden_size, dtype=dtype)
        self._hidden = hidden
        logits = _example(batch, tokens, job.model.vocab_size, dtype=dtype)
        torch_stage = PipelineStage(
            model,
            stage,
            layout.pp,
            mesh.device,
            input_args=ids if self._first else hidden,
            output_args=logits if self._last else hidden,
            group=mesh.pipeline_group,
        )
        # The loss is divided by the global number of tokens before backward, so torch must not divide again.
        self._schedule = Schedule1F1B(torch_stage, micro_batches, loss_fn=loss, scale_grads=False)

    def run(self, batches: MicroBatches) -> list[Tensor]:
        """Returns the losses of the micro-batches on the last stage, else []."""
        losses: list[Tensor] = []
        documents: dict[str, Any] = (
            {} if batches.documents_MBS is None else {"documents_BS": batches.documents_MBS.flatten(0, 1)}
        )
        self._schedule.step(
            *((batches.input_ids_MBT.flatten(0, 1),) if self._first else ()),
            target=batches.labels_MBT.flatten(0, 1) if self._last else None,
            losses=losses if self._last else None,
            return_outputs=False,
            **documents,
        )
        return [loss.detach() for loss in losses]

    @torch.no_grad()
    def evaluate(self, batches: MicroBatches) -> list[Tensor]:
        """Forward only, any number of micro-batches: their losses on the last stage, else []."""
        losses: list[Tensor] = []
        sent: list[tuple[Any, Tensor]] = []
        for index in range(len(batches)):
            x = batches.input_ids_MBT[index]
            if not self._first:
                x = torch.empty(self._hidden.shape, dtype=self._hidden.dtype, device=self._mesh.device)
                dist.recv(x, group=self._mesh.pipeline_group, group_src=self._mesh.place.pp - 1)
            x = self._model(x, None if batches.documents_MBS is None else batches.documents_MBS[index])
            if self._last:
                losses.append(self._loss(x, batches.labels_MBT[index]))
            else:
                # Kept until it has been sent.
                work = dist.isend(x, group=self._mesh.pipeline_group, group_dst=self._mesh.place.pp + 1)
                sent.append((work, x))
        for work, _ in sent:
            work.wait()
        return losses


def _example(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)
