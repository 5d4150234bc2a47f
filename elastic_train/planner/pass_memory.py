"""What forward passes leave for the backward pass on one pipeline rank, and what is there beside it; all in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TypedDict

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.planner.activations import (
    LossBytes,
    Recompute,
    backward_bytes,
    block_bytes,
    kernel_of,
    loss_bytes,
    mask_bytes,
    outer_bytes,
    table_bytes,
)
from elastic_train.planner.constraints import micro_batches_per_rank
from elastic_train.planner.model_state import numbers_of
from elastic_train.planner.parameters import StageParameters


class _Shape(TypedDict):
    sequence: int
    batch: int
    number_bytes: int


class PassMemory:
    """Of one micro-batch where nothing else is said."""

    def __init__(self, job: Job, layout: Layout, stages: Sequence[StageParameters]) -> None:
        self._job, self._layout, self._stages = job, layout, stages
        self._fused = job.hosts.device == "cuda"
        self._shape: _Shape = {
            "sequence": job.data.sequence_length,
            "batch": job.training.micro_batch,
            "number_bytes": numbers_of(job).compute,
        }

    @cached_property
    def block(self) -> int:
        """Kept by one block."""
        return self._of_block(self._job.training.recompute)

    @cached_property
    def blocks(self) -> int:
        """Kept by all blocks of the rank."""
        return self.block * sum(stage.blocks for stage in self._stages)

    @cached_property
    def outside(self) -> int:
        """Kept outside the blocks, without logits: masks and positions too, which the blocks of a stage share."""
        model, layout = self._job.model, self._layout
        kept = len(self._stages) * self._context
        for stage in self._stages:
            options = {"last": stage.last, "fused_norm": self._fused, "frozen": self._job.lora is not None}
            kept += sum(outer_bytes(model, layout, **options, **self._shape).values())
        return kept

    @property
    def _context(self) -> int:
        job, layout, documents = self._job, self._layout, self._job.data.separates_documents
        masks = mask_bytes(layout, documents=documents, context=job.parallel.context, **self._shape)
        held = job.data.sequence_length // layout.cp * (job.training.micro_batch if documents else 1)
        return masks + (table_bytes(job.model, sequence=held) if documents or layout.cp > 1 else 0)

    @cached_property
    def loss(self) -> LossBytes:
        """Of logits and loss; nothing where the last stage is not."""
        if not any(stage.last for stage in self._stages):
            return LossBytes(0, 0, 0)
        return loss_bytes(self._job.model, self._layout, **self._shape)

    @cached_property
    def backward(self) -> int:
        """What comes up in the backward pass of one block: gradients of activations, and what is computed again."""
        again = self._of_block("none") if self._job.training.recompute == "full" else 0
        return again + backward_bytes(self._job.model, self._layout, **self._shape)

    @cached_property
    def standing(self) -> dict[str, int]:
        """There all the time: the tokens of a step, rotary tables, and what pipelines receive into."""
        job, layout = self._job, self._layout
        length, documents = job.data.sequence_length, job.data.separates_documents
        tokens = micro_batches_per_rank(job, layout) * job.training.micro_batch * length // layout.cp
        tables = len(self._stages) * table_bytes(job.model, sequence=length)
        ends = sum((not stage.first) + (not stage.last) for stage in self._stages)
        hidden = tokens // layout.tp * job.model.hidden_size * self._shape["number_bytes"]
        return {
            "tokens and tables": tokens * 16 + (tokens * layout.cp * 8 if documents else 0) + tables,
            "pipeline buffers": ends * hidden if layout.pp > 1 else 0,
        }

    def _of_block(self, recompute: Recompute) -> int:
        terms = block_bytes(
            self._job.model,
            self._layout,
            recompute=recompute,
            context=self._job.parallel.context,
            kernel=kernel_of(self._job, self._layout.cp, self._job.parallel.context),
            documents=self._job.data.separates_documents,
            fused_norm=self._fused,
            lora=self._job.lora,
            **self._shape,
        )
        return sum(terms.values())
