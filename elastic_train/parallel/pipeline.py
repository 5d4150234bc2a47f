"""The ``pp`` axis: which layers a stage holds, and the 1F1B schedule over torch's pipeline stages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from elastic_train.model.transformer import Transformer
from elastic_train.parallel.mesh import ParallelMesh


def stage_layers(layers: int, stages: int, stage: int) -> range:
    """Contiguous, balanced split; the first ``layers % stages`` stages hold one more (the last one has the head)."""
    base, extra = divmod(layers, stages)
    start = stage * base + min(stage, extra)
    return range(start, start + base + (stage < extra))


class Pipeline:
    """Runs the micro-batches of a step through all stages and leaves reduced gradients in the parameters."""

    def __init__(
        self,
        model: Transformer,
        mesh: ParallelMesh,
        *,
        micro_batch: int,
        sequence_length: int,
        micro_batches: int,
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        stage, stages = mesh.place.pp, mesh.layout.pp
        self._first, self._last = stage == 0, stage == stages - 1
        # Static shapes: without them torch sends pickled metadata between the stages and runs a trial step.
        config = model.config
        ids = torch.empty(micro_batch, sequence_length, dtype=torch.int64, device="meta")
        hidden = _example(micro_batch, sequence_length // mesh.layout.tp, config.hidden_size)
        logits = _example(micro_batch, sequence_length, config.vocab_size)
        torch_stage = PipelineStage(
            model,
            stage,
            stages,
            mesh.device,
            input_args=ids if self._first else hidden,
            output_args=logits if self._last else hidden,
            group=mesh.pipeline_group,
        )
        # The loss is divided by the global number of tokens before backward, so torch must not divide again.
        self._schedule = Schedule1F1B(torch_stage, micro_batches, loss_fn=loss, scale_grads=False)

    def run(self, input_ids: Tensor, labels: Tensor) -> list[Tensor]:
        """``input_ids``, ``labels``: int64 [micro_batches * B, T]. Returns the losses on the last stage, else []."""
        losses: list[Tensor] = []
        self._schedule.step(
            *((input_ids,) if self._first else ()),
            target=labels if self._last else None,
            losses=losses if self._last else None,
            return_outputs=False,
        )
        return [loss.detach() for loss in losses]


def _example(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.float32, device="meta", requires_grad=True)
