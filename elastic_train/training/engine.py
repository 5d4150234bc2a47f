"""One rank of one generation: builds its part of the model, runs steps, exposes its state.

Importing this module loads everything a trainer needs, and starts no thread and no process group: a forkserver that
imported it forks trainers that are ready to go.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.data.batches import PADDING_LABEL, slots_of
from elastic_train.model.initialize import fill_initial
from elastic_train.parallel.data import local_part, mark_last_backward
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.parallel.parallelize import parallelize
from elastic_train.parallel.pipeline import Pipeline
from elastic_train.parallel.shard import LocalShard, local_box, replicas
from elastic_train.parallel.tensor import sum_replicated_gradients, tensor_dim
from elastic_train.planner.constraints import check_layout, micro_batches_per_rank
from elastic_train.training.gradients import clip, local_gradients, squared_norm
from elastic_train.training.loss import TokenLoss
from elastic_train.training.optimizer import LocalAdamW
from elastic_train.training.schedule import learning_rate

Samples = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Input ids and labels, int64 [micro_batch, sequence_length]."""


class Batches(Protocol):
    """Where the engine gets its samples (``data.batches.StepBatches``)."""

    def slot(self, step: int, index: int) -> Samples: ...

    def padding(self) -> Samples: ...


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What one step did; the same values on every rank.

    ``loss``: mean over the valid tokens of the global batch. ``grad_norm``: L2 norm before clipping. If one of them is
    NaN or infinite, nothing was updated. ``lr``: learning rate of the step.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    valid_tokens: int


class Engine:
    """Trains one job in one layout. All ranks call the same methods in the same order."""

    def __init__(self, job: Job, layout: Layout, rank: int, batches: Batches) -> None:
        """The default process group is initialised with ``layout.world_size`` ranks, this one being ``rank``.

        Weights are uninitialised afterwards: call ``initialize`` or write into ``state``. Raises ValueError with all
        reasons if the layout cannot run the job.
        """
        problems = check_layout(job.model, job.training, job.data, layout)
        if problems:
            raise ValueError(f"layout {layout} cannot run this job: " + "; ".join(problems))
        self.on_progress: Callable[[], None] = lambda: None
        self._job = job
        self._batches = batches
        self._device = _device(job.hosts.device)
        self._mesh = ParallelMesh(layout, rank, self._device)
        parallel = parallelize(config=job.model, mesh=self._mesh)
        self._model = parallel.module
        self._parameters: dict[str, nn.Parameter] = dict(self._model.named_parameters())
        self._shards = {name: self._shard(name, shape) for name, shape in parallel.global_shapes.items()}
        self._copies = {name: replicas(tensor_dim(name), layout) for name in self._parameters}
        self._optimizer = LocalAdamW({name: shard.tensor for name, shard in self._shards.items()}, job.optimizer)
        self._micro_batches = micro_batches_per_rank(job.training.slots, layout.data_ranks)
        self._loss = TokenLoss()
        self._pipeline = self._build_pipeline() if layout.pp > 1 else None
        for block in self._model.blocks.values():
            block.register_forward_pre_hook(self._beat_forward)
            block.register_forward_hook(self._beat_backward)

    def initialize(self) -> None:
        """Write the initial weights: a function of (seed, name, shape), whatever the layout. Moments become zero."""
        std = self._job.model.initializer_range
        for name, shard in self._shards.items():
            fill_initial(shard.tensor, name, shard.global_shape, shard.offsets, self._job.seed, std)
            self._optimizer.exp_avg[name].zero_()
            self._optimizer.exp_avg_sq[name].zero_()

    def state(self) -> dict[str, LocalShard]:
        """The live local parts of all tensors, complete from step 0 on.

        Keys: ``param.``, ``exp_avg.`` or ``exp_avg_sq.`` + parameter name (HF names, global layer numbers).
        """
        state: dict[str, LocalShard] = {}
        for name, shard in self._shards.items():
            tensors = (shard.tensor, self._optimizer.exp_avg[name], self._optimizer.exp_avg_sq[name])
            for kind, tensor in zip(("param", "exp_avg", "exp_avg_sq"), tensors, strict=True):
                state[f"{kind}.{name}"] = LocalShard(tensor, shard.global_shape, shard.offsets)
        return state

    def train_step(self, step: int) -> StepMetrics:
        """Run update number ``step`` (1-based) on its samples. A step that is not finite changes nothing, anywhere."""
        input_ids, labels = self._load(step)
        self._loss.valid_tokens = self._count_valid(labels)
        self._model.zero_grad(set_to_none=True)
        if self._pipeline is not None:
            losses = self._pipeline.run(input_ids.flatten(0, 1), labels.flatten(0, 1))
        else:
            losses = self._run_micro_batches(input_ids, labels)
        gradients = local_gradients(self._parameters)
        sum_replicated_gradients(gradients, self._mesh)
        loss, norm = self._reduce(losses, gradients)
        optimizer = self._job.optimizer
        rate = learning_rate(step, optimizer=optimizer, schedule=self._job.schedule, steps=self._job.training.steps)
        # Loss and norm are sums over all ranks: every rank takes the same decision here.
        if math.isfinite(loss) and math.isfinite(norm):
            clip(gradients, norm, optimizer.clip_norm)
            self._optimizer.step(gradients, step=step, lr=rate)
        return StepMetrics(step, loss, norm, rate, self._loss.valid_tokens)

    def _run_micro_batches(self, input_ids: Tensor, labels: Tensor) -> list[Tensor]:
        losses = []
        for index in range(self._micro_batches):
            mark_last_backward(self._model, index == self._micro_batches - 1)
            loss = self._loss(self._model(input_ids[index]), labels[index])
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        return losses

    def _load(self, step: int) -> tuple[Tensor, Tensor]:
        """int64 [micro_batches, B, T] ids and labels of this data rank's slots; missing slots are padding."""
        slots = slots_of(self._mesh.data_rank, self._mesh.layout.data_ranks, self._job.training.slots)
        samples = [self._batches.slot(step, slot) for slot in slots]
        samples += [self._batches.padding()] * (self._micro_batches - len(samples))
        ids, labels = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*samples, strict=True))
        return ids.to(self._device), labels.to(self._device)

    def _count_valid(self, labels: Tensor) -> int:
        valid = (labels != PADDING_LABEL).sum()
        if self._mesh.data_group is not None:
            dist.all_reduce(valid, group=self._mesh.data_group)
        return int(valid.item())

    def _reduce(self, losses: list[Tensor], gradients: dict[str, Tensor]) -> tuple[float, float]:
        """Loss of the step and global gradient norm, in one collective over all ranks."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        if losses and self._mesh.place.tp == 0:
            sums[0] = torch.stack(losses).double().sum()
        sums[1] = squared_norm(gradients, self._copies)
        dist.all_reduce(sums)
        loss, squared = sums.tolist()
        return loss, math.sqrt(squared)

    def _shard(self, name: str, shape: tuple[int, ...]) -> LocalShard:
        local = local_part(self._parameters[name].detach())
        box = local_box(shape, tensor_dim(name), self._mesh.layout, self._mesh.place)
        if tuple(local.shape) != box.sizes and (local.numel() or math.prod(box.sizes)):
            raise RuntimeError(f"{name}: torch holds a part of shape {tuple(local.shape)}, its place says {box.sizes}")
        if not local.is_contiguous():
            raise RuntimeError(f"{name}: the local part is not contiguous (strides {local.stride()})")
        return LocalShard(local, shape, box.offsets)

    def _build_pipeline(self) -> Pipeline:
        return Pipeline(
            self._model,
            self._mesh,
            micro_batch=self._job.training.micro_batch,
            sequence_length=self._job.data.sequence_length,
            micro_batches=self._micro_batches,
            loss=self._loss,
        )

    def _beat_forward(self, block: nn.Module, arguments: Any) -> None:
        self.on_progress()

    def _beat_backward(self, block: nn.Module, arguments: Any, output: Tensor) -> None:
        """Beat when the gradient of the block's output arrives (a module hook would turn the output into a view)."""
        if output.requires_grad:
            output.register_hook(lambda gradient: self.on_progress())  # type: ignore[no-untyped-call]


def _device(kind: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
