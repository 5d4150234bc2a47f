"""One rank of one generation: builds its part of the model, runs steps, exposes its state.

Importing this module loads everything a trainer needs, and starts no thread and no process group: a forkserver that
imported it forks trainers that are ready to go.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.data.batches import slots_of
from elastic_train.data.consumed import batch_digest
from elastic_train.data.errors import DataError
from elastic_train.data.samples import PADDING_LABEL, Slot
from elastic_train.model.hf_folder import HfFolder
from elastic_train.model.initialize import fill_initial
from elastic_train.model.lora import is_adapter
from elastic_train.parallel.batches import MicroBatches
from elastic_train.parallel.exact import ExactGradients, from_fixed_point
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.parallel.parallelize import parallelize
from elastic_train.parallel.pipeline import Pipeline
from elastic_train.parallel.shard import LocalShard, cuts_of, replicas
from elastic_train.parallel.tensor import sum_replicated_gradients, tensor_dim
from elastic_train.parallel.tied import copies_in_stages, sum_tied_gradients
from elastic_train.planner.constraints import check_layout, micro_batches_per_rank
from elastic_train.training.ema import KIND, AveragedWeights
from elastic_train.training.evaluation import EvaluationSamples, is_due, rounds
from elastic_train.training.exact import reduce_exactly, sum_by_slot
from elastic_train.training.gradients import clipping, squared_norm
from elastic_train.training.loss import build_loss
from elastic_train.training.optimizer import build_optimizer
from elastic_train.training.pretrained import load_pretrained
from elastic_train.training.schedule import learning_rate


class Batches(Protocol):
    """Where the engine gets its samples (``data.batches.StepBatches``)."""

    def load(self, step: int, slots: range) -> list[Slot]: ...

    def padding(self) -> Slot: ...


@dataclass(frozen=True, slots=True)
class StepGradients:
    """Loss of the global batch, L2 norm of its gradient, and this rank's shards of the gradient, not clipped."""

    loss: float
    norm: float
    valid_tokens: int
    shards: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What one step did; the same values on every rank.

    ``loss``: mean over the valid tokens of the global batch. ``grad_norm``: L2 norm before clipping. ``lr``: learning
    rate of the step. ``eval_loss``: mean over the valid tokens of the evaluation samples after the update,
    ``eval_loss_ema`` with the averaged weights; None when none was due. ``skipped``: why nothing was
    updated; None if it was.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    valid_tokens: int
    eval_loss: float | None = None
    eval_loss_ema: float | None = None
    skipped: str | None = None

    def evaluation(self) -> dict[str, float]:
        """The losses of an evaluation by name; {} when none was due."""
        losses = {"eval_loss": self.eval_loss, "eval_loss_ema": self.eval_loss_ema}
        return {name: loss for name, loss in losses.items() if loss is not None}


class Engine:
    """Trains one job in one layout. All ranks call the same methods in the same order."""

    def __init__(
        self, job: Job, layout: Layout, rank: int, batches: Batches, evaluation: EvaluationSamples | None = None
    ) -> None:
        """The default process group is initialised with ``layout.world_size`` ranks, this one being ``rank``.

        ``evaluation``: the samples that ``job.evaluation`` names. Weights are uninitialised afterwards: call
        ``initialize`` or write into ``state``. Raises ValueError with all reasons if the layout cannot run the job.
        """
        problems = check_layout(job, layout)
        if job.evaluation.uri is not None and evaluation is None:
            problems.append(f"evaluation.uri={job.evaluation.uri}: its samples were not given")
        if problems:
            raise ValueError(f"layout {layout} cannot run this job: " + "; ".join(problems))
        self.on_progress: Callable[[], None] = lambda: None
        self.before_update: Callable[[], None] = lambda: None
        """called before a step changes anything in ``state``: until then whoever copies it has time"""
        self.data_seconds = 0.0
        """How long the last step fetched its samples."""
        self.batch_digest = ""
        """Of the slots that this rank's data rank was given in the last step (``data.consumed``)."""
        self.judge: Callable[[int, float, float], str | None] = _judge_finite
        """called with step, loss and gradient norm before the update: says why there must be none, or None"""
        self.evaluation_seconds = 0.0
        """How long the evaluation of the last step took; 0 when none was due."""
        self._job = job
        self._batches, self._evaluation = batches, evaluation
        self._device = _device(job.hosts.device)
        self._mesh = ParallelMesh(layout, rank, self._device)
        parallel = parallelize(job=job, mesh=self._mesh)
        self._stages, self._data = parallel.stages, parallel.data
        self._exact: ExactGradients | None = None
        if job.training.determinism == "exact":
            self._exact = ExactGradients(self._stages, self._data, self._mesh, slots=job.training.slots)
        self._optimizer = build_optimizer(self._data.trained, job, self._mesh, cut=self._data.shards_are_cut)
        self._average: AveragedWeights | None = None
        if job.training.ema_decay is not None:
            weights = {name: shard.tensor for name, shard in self._data.trained.items()}
            self._average = AveragedWeights(weights, job.training.ema_decay)
        self._copies = {name: self._replicas(name) for name in self._data.trained}
        self.slots = slots_of(self._mesh.data_rank, layout.data_ranks, job.training.slots)
        """those of each step that this rank's data rank computes"""
        self._micro_batches = micro_batches_per_rank(job, layout)
        self._loss = build_loss(job.model, self._mesh)
        self._pipeline = self._build_pipeline() if layout.pp > 1 else None
        for _, block in self._stages.blocks():
            block.register_forward_pre_hook(self._beat_forward)
            block.register_forward_hook(self._beat_backward)

    def initialize(self, pretrained: HfFolder | None = None) -> None:
        """Write the initial weights: those of ``pretrained`` where it has them, else random. Moments become zero.

        Random weights are a function of (seed, name, shape), whatever the layout. Raises as ``load_pretrained``.
        """
        loaded: dict[str, LocalShard] = {}
        if pretrained is not None:
            loaded = {name: shard for name, shard in self._data.shards.items() if not is_adapter(name)}
            load_pretrained(pretrained, loaded)
        std = self._job.model.initializer_range
        for name, shard in self._data.shards.items():
            if name not in loaded:
                fill_initial(shard.tensor, name, shard.global_shape, shard.offsets, self._job.seed, std)
        for tensors in self._optimizer.state.values():
            for tensor in tensors.values():
                tensor.zero_()
        if self._average is not None:
            self._average.start()
        self.publish()

    def state(self) -> dict[str, LocalShard]:
        """The live local parts of all tensors, complete from step 0 on. Call ``publish`` after writing into them.

        Keys: ``param.``, the optimizer's kind of state, such as ``exp_avg.``, or ``ema.``, + parameter name (HF names,
        global layer numbers). Frozen parameters have ``param.`` alone.
        """
        shards = self._data.shards
        state = {f"param.{name}": shard for name, shard in shards.items()}
        averages = {KIND: self._average.average} if self._average is not None else {}
        for kind, tensors in (self._optimizer.state | averages).items():
            for name, tensor in tensors.items():
                state[f"{kind}.{name}"] = LocalShard(tensor, shards[name].global_shape, shards[name].offsets)
        return state

    @property
    def frozen(self) -> set[str]:
        """Keys of ``state`` that no step changes."""
        return {f"param.{name}" for name in self._data.shards.keys() - self._data.trained.keys()}

    def publish(self) -> None:
        """Make the weights that compute uses follow ``state``, after it was written. Every rank calls it."""
        self._data.publish()

    def train_step(self, step: int) -> StepMetrics:
        """Run update number ``step`` (1-based) on its samples, and an evaluation where one is due.

        A step that ``judge`` finds bad changes nothing, anywhere.
        """
        metrics = self.update(step, self.compute_gradients(step))
        started = time.perf_counter()
        due = is_due(self._job, step)
        metrics = self._with_evaluation(metrics) if due else metrics
        self.evaluation_seconds = time.perf_counter() - started if due else 0.0
        return metrics

    def compute_gradients(self, step: int) -> StepGradients:
        """Loss and gradient of the samples of ``step`` at the weights as they are."""
        batches = self._load(step)
        self._loss.valid_tokens = self._count_valid(batches.labels_MBT)
        self._data.start_step()
        if self._exact is not None:
            self._exact.start_step(len(self.slots))
        losses = self._pipeline.run(batches) if self._pipeline is not None else self._run_micro_batches(batches)
        gradients = self._gradients()
        loss, norm = self._reduce(losses, gradients)
        return StepGradients(loss, norm, self._loss.valid_tokens, gradients)

    def update(self, step: int, gradients: StepGradients) -> StepMetrics:
        """Update number ``step`` with ``gradients``, clipped; none if ``judge`` finds it bad."""
        optimizer, schedule = self._job.optimizer, self._job.schedule
        rate = learning_rate(step, optimizer=optimizer, schedule=schedule, steps=self._job.training.steps)
        # Loss and norm are sums over all ranks: every rank takes the same decision here.
        bad = self.judge(step, gradients.loss, gradients.norm)
        self.before_update()
        if bad is None:
            scale = clipping(gradients.norm, optimizer.clip_norm)
            self._optimizer.step(gradients.shards, step=step, lr=rate, scale=scale)
            if self._average is not None:
                self._average.update()
            self._data.publish(frozen=False)
        return StepMetrics(step, gradients.loss, gradients.norm, rate, gradients.valid_tokens, skipped=bad)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the valid tokens of the evaluation samples, at the weights as they are. Changes nothing."""
        assert self._evaluation is not None
        self._loss.valid_tokens = 1
        layout, place = self._mesh.layout, self._mesh.place
        losses: list[Tensor] = []
        valid = torch.zeros((), dtype=torch.int64, device=self._device)
        for samples in rounds(self._evaluation, self._mesh.data_rank, layout.data_ranks, self._micro_batches):
            batches = self._to_tensors(samples)
            losses += self._forward(batches)
            # Every stage and tensor rank has the labels: one of them counts.
            valid += (batches.labels_MBT != PADDING_LABEL).sum() * (place.pp == 0 and place.tp == 0)
        self._data.release()
        dist.all_reduce(valid)
        count = self._evaluation.slots
        own = slots_of(self._mesh.data_rank, layout.data_ranks, count)
        return self._total(losses, own, count) / max(1, int(valid.item()))

    def _total(self, losses: list[Tensor], slots: range, count: int) -> float:
        """Sum of losses over all ranks; arguments as in ``sum_by_slot``."""
        if self._exact is not None:
            return sum_by_slot(losses, slots, count, self._mesh)
        total = self._sum_of(losses)
        dist.all_reduce(total)
        return total.item()

    def _with_evaluation(self, metrics: StepMetrics) -> StepMetrics:
        losses = self.evaluations()
        return replace(metrics, eval_loss=losses["eval_loss"], eval_loss_ema=losses.get("eval_loss_ema"))

    def evaluations(self) -> dict[str, float]:
        """``eval_loss``, and ``eval_loss_ema`` with the averaged weights where the job has them. Changes nothing."""
        losses = {"eval_loss": self.evaluate()}
        if self._average is not None:
            self._swap_average(self._average)
            losses["eval_loss_ema"] = self.evaluate()
            self._swap_average(self._average)
        return losses

    @torch.no_grad()
    def _swap_average(self, average: AveragedWeights) -> None:
        average.swap()
        self._data.publish(frozen=False)

    def _forward(self, batches: MicroBatches) -> list[Tensor]:
        """Losses of micro-batches without a backward pass; [] where the last stage is not."""
        if self._pipeline is not None:
            return self._pipeline.evaluate(batches)
        (model,) = self._stages.modules
        documents = [None] * len(batches) if batches.documents_MBS is None else batches.documents_MBS
        inputs = zip(batches.input_ids_MBT, batches.labels_MBT, documents, strict=True)
        return [self._loss(model(ids, places), labels) for ids, labels, places in inputs]

    def _run_micro_batches(self, batches: MicroBatches) -> list[Tensor]:
        (model,) = self._stages.modules
        losses = []
        for index in range(len(batches)):
            self._data.before_backward(index == len(batches) - 1)
            documents = None if batches.documents_MBS is None else batches.documents_MBS[index]
            loss = self._loss(model(batches.input_ids_MBT[index], documents), batches.labels_MBT[index])
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        return losses

    def _load(self, step: int) -> MicroBatches:
        """This rank's tokens of its data rank's slots; missing slots are padding."""
        started = time.perf_counter()
        samples = self._batches.load(step, self.slots)
        self.data_seconds = time.perf_counter() - started
        self.batch_digest = batch_digest(self.slots, samples)
        samples += [self._batches.padding()] * (self._micro_batches - len(samples))
        return self._to_tensors(samples)

    def _to_tensors(self, slots: list[Slot]) -> MicroBatches:
        ids, labels, documents = (np.stack(arrays) for arrays in zip(*slots, strict=True))
        self._check_tokens(ids, labels)
        input_ids_MBT, labels_MBT = (self._held(torch.from_numpy(array).to(self._device)) for array in (ids, labels))
        documents_MBS = None
        if self._job.data.separates_documents:
            documents_MBS = torch.from_numpy(documents).to(self._device)
        return MicroBatches(input_ids_MBT, labels_MBT, documents_MBS)

    def _check_tokens(self, ids: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]) -> None:
        """Raises DataError for a token that the model has no row for: with tensor ranks it would count, unnoticed."""
        size = self._job.model.vocab_size
        wrong = {
            "input id": ids[(ids < 0) | (ids >= size)],
            "label": labels[(labels != PADDING_LABEL) & ((labels < 0) | (labels >= size))],
        }
        for kind, tokens in wrong.items():
            if tokens.size:
                raise DataError(f"the data has the {kind} {tokens[0]}, outside the {size} of model.vocab_size={size}")

    def _held(self, x_MBS: Tensor) -> Tensor:
        """The tokens that this rank holds of every sequence: all of them, where ``cp`` is 1."""
        indices_T = self._stages.modules[0].indices_T
        return x_MBS if indices_T is None else x_MBS[..., indices_T]

    def _gradients(self) -> dict[str, Tensor]:
        """This rank's shards of the gradient of the step, summed over all ranks that contribute to them."""
        gradients = self._data.gradients() if self._exact is None else self._exact.sums()
        sum_replicated_gradients(gradients, self._mesh)
        sum_tied_gradients(gradients, self._job.model, self._mesh)
        return gradients if self._exact is None else from_fixed_point(gradients)

    def _count_valid(self, labels: Tensor) -> int:
        valid = (labels != PADDING_LABEL).sum()
        dist.all_reduce(valid, group=self._mesh.batch_group)
        return int(valid.item())

    def _reduce(self, losses: list[Tensor], gradients: dict[str, Tensor]) -> tuple[float, float]:
        """Loss of the step and global gradient norm, in one collective over all ranks."""
        if self._exact is not None:
            count, invalid = self._job.training.slots, self._exact.out_of_range
            return reduce_exactly(losses, self.slots, gradients, self._copies, self._mesh, count=count, invalid=invalid)
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        sums[0] = self._sum_of(losses)
        sums[1] = squared_norm(gradients, self._copies)
        dist.all_reduce(sums)
        loss, squared = sums.tolist()
        return loss, math.sqrt(squared)

    def _sum_of(self, losses: list[Tensor]) -> Tensor:
        """float64 scalar: what this rank adds to a sum of losses over all ranks. Tensor ranks have the same ones."""
        if not losses or self._mesh.place.tp:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return torch.stack(losses).double().sum()

    def _replicas(self, name: str) -> int:
        """How many ranks hold the same part of parameter ``name``."""
        layout, sharded = self._mesh.layout, self._data.shards_are_cut
        in_stage = replicas(cuts_of(tensor_dim(name), layout, self._mesh.place, sharded=sharded), layout)
        return in_stage * copies_in_stages(name, self._job.model, layout.pp)

    def _build_pipeline(self) -> Pipeline:
        return Pipeline(self._stages, self._job, self._mesh, micro_batches=self._micro_batches, loss=self._loss)

    def _beat_forward(self, block: nn.Module, arguments: Any) -> None:
        self.on_progress()

    def _beat_backward(self, block: nn.Module, arguments: Any, output: Tensor) -> None:
        """Beat when the gradient of the block's output arrives (a module hook would turn the output into a view)."""
        if output.requires_grad:
            output.register_hook(lambda gradient: self.on_progress())  # type: ignore[no-untyped-call]


def _judge_finite(step: int, loss: float, norm: float) -> str | None:
    return None if math.isfinite(loss) and math.isfinite(norm) else f"loss is {loss}, grad_norm is {norm}"


def _device(kind: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
