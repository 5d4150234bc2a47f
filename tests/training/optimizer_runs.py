"""Jobs and ranks of the tests of optimizers, averaged weights and evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.data.errors import DataError
from elastic_train.data.evaluation import EvaluationBatches
from elastic_train.data.samples import Sample
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.parallel.shard import LocalShard
from elastic_train.training.engine import Engine, StepMetrics
from elastic_train.training.loss import TokenLoss
from elastic_train.training.optimizer import build_optimizer
from tests.samples import OneByOne, sample_of
from tests.training.runs import Array, Piece, pieces, write
from tests.training.synthetic import SyntheticBatches, small_job


def job_with_optimizer(name: str, optimizer: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Job:
    """``small_job`` with another optimizer, of which only what ``optimizer`` has is not the default."""
    values = small_job(**sections).as_dict()
    values["optimizer"] = {"name": name, "learning_rate": 1e-3} | (optimizer or {})
    return Job.model_validate(values, strict=False)


def norms_with_a_spike(
    rank: int, job: Job, layout: Layout, steps: int, spike: float
) -> tuple[list[StepMetrics], dict[str, Piece], dict[str, Piece]]:
    """Metrics, and weights before and after the last step, in which every gradient is ``spike`` times as large."""
    engine = Engine(job, layout, rank, SyntheticBatches(job))
    engine.initialize()
    metrics = [engine.train_step(step) for step in range(1, steps)]
    before = pieces(engine)
    usual = TokenLoss.__call__

    def steeper(self: TokenLoss, logits: Tensor, labels: Tensor) -> Tensor:
        loss = usual(self, logits, labels)
        return loss + (spike - 1) * (loss - loss.detach())

    TokenLoss.__call__ = steeper  # type: ignore[method-assign]
    return [*metrics, engine.train_step(steps)], before, pieces(engine)


def muon_beside_torch(rank: int, job: Job) -> dict[str, tuple[float, float]]:
    """By parameter: largest difference of ours to torch's after six steps, and how far torch's has moved."""
    shapes = {"model.layers.0.q_proj.weight": (24, 16), "model.layers.0.down_proj.weight": (8, 40)}
    shapes |= {"model.layers.0.norm.weight": (16,), "model.embed_tokens.weight": (9, 16), "lm_head.weight": (9, 16)}
    torch.manual_seed(0)
    start = {name: torch.randn(shape) for name, shape in shapes.items()}
    ours = {name: LocalShard(value.clone(), value.shape, (0,) * value.dim()) for name, value in start.items()}
    theirs = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    matrices = [theirs[name] for name in list(shapes)[:2]]
    muon = torch.optim.Muon(matrices, lr=1e-2, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": [theirs["lm_head.weight"]], "weight_decay": 0.1}]
    groups += [{"params": [theirs[name] for name in list(shapes)[2:4]], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=job.optimizer.betas, eps=job.optimizer.eps)
    mesh = ParallelMesh(Layout(), 0, torch.device("cpu"))
    optimizer = build_optimizer(ours, job, mesh, cut=True)
    for step in range(1, 7):
        gradients = {name: torch.randn(shape) for name, shape in shapes.items()}
        for name, parameter in theirs.items():
            parameter.grad = gradients[name].clone()
        muon.step()
        adamw.step()
        if step == 4:
            saved = optimizer.state
            optimizer = build_optimizer(ours, job, mesh, cut=True)
            for kind, tensors in optimizer.state.items():
                for name, live in tensors.items():
                    live.copy_(saved[kind][name])
        optimizer.step(gradients, step=step, lr=1e-2)
    return {
        name: (
            (ours[name].tensor - theirs[name].detach()).abs().max().item(),
            (theirs[name].detach() - start[name]).abs().max().item(),
        )
        for name in shapes
    }


class NumberedSamples(OneByOne):
    """A data set whose samples are random and a function of their number."""

    def __init__(self, job: Job, count: int = 1000) -> None:
        self.sequence_length, self._vocabulary, self._count = job.data.sequence_length, job.model.vocab_size, count

    def __len__(self) -> int:
        return self._count

    def sample(self, index: int) -> Sample:
        random = np.random.default_rng((7, index))
        return sample_of(random.random(self.sequence_length + 1) ** 2 * self._vocabulary)


def evaluation_of(job: Job) -> EvaluationBatches:
    return EvaluationBatches(NumberedSamples(job), samples=job.evaluation.samples, micro_batch=job.training.micro_batch)


def train_and_evaluate(
    rank: int, job: Job, layout: Layout, steps: int, state: dict[str, Array] | None
) -> tuple[list[StepMetrics], dict[str, Piece]]:
    """Metrics, and the state at the end."""
    evaluation = evaluation_of(job) if job.evaluation.uri else None
    engine = Engine(job, layout, rank, SyntheticBatches(job, masked=0.6), evaluation)
    if state is None:
        engine.initialize()
    else:
        write(engine, state)
        engine.publish()
    metrics = []
    for step in range(1, steps + 1):
        metrics.append(engine.train_step(step))
        assert (engine.evaluation_seconds > 0) == (metrics[-1].eval_loss is not None)
    return metrics, pieces(engine)


def evaluate_at(rank: int, job: Job, layout: Layout, state: dict[str, Array]) -> tuple[float, float]:
    """Loss of the evaluation samples at ``state``: as an evaluation has it, and as a training step has it."""
    evaluation = evaluation_of(job)
    engine = Engine(job, layout, rank, AsStep(evaluation), evaluation)
    write(engine, state)
    engine.publish()
    return engine.evaluate(), engine.compute_gradients(1).loss


def evaluate_wrong_tokens(rank: int, job: Job, layout: Layout) -> str:
    """What an evaluation says whose samples have twice as many tokens as the model."""
    twice = job.model_copy(update={"model": job.model.model_copy(update={"vocab_size": 2 * job.model.vocab_size})})
    engine = Engine(job, layout, rank, SyntheticBatches(job), evaluation_of(twice))
    engine.initialize()
    try:
        engine.evaluate()
    except DataError as error:
        return str(error)
    return "nothing"


class AsStep:
    """The samples of an evaluation, as a step would train on them."""

    def __init__(self, evaluation: EvaluationBatches) -> None:
        self._evaluation = evaluation
        self.padding = evaluation.padding

    def load(self, step: int, slots: range) -> list[Any]:
        there = self._evaluation.slots
        return [self._evaluation.slot(index) if index < there else self.padding() for index in slots]


def average_by_hand(rank: int, job: Job, layout: Layout, steps: int) -> tuple[dict[str, Piece], dict[str, Piece]]:
    """State at the end, and what the average of the weights should be: float64, from the weights after each step."""
    decay = job.training.ema_decay
    assert decay is not None
    engine = Engine(job, layout, rank, SyntheticBatches(job))
    engine.initialize()
    average = {key: torch.tensor(value[2], dtype=torch.float64) for key, value in _weights(engine).items()}
    for step in range(1, steps + 1):
        engine.train_step(step)
        for key, (_, _, value) in _weights(engine).items():
            average[key] = decay * average[key] + (1 - decay) * torch.from_numpy(value).double()
    expected = {
        key.replace("param.", "ema."): (shape, offsets, average[key].float().numpy())
        for key, (shape, offsets, _) in _weights(engine).items()
    }
    return pieces(engine), expected


def _weights(engine: Engine) -> dict[str, Piece]:
    return {key: piece for key, piece in pieces(engine).items() if key.startswith("param.")}


def changes_outside_updates(rank: int, job: Job, layout: Layout, steps: int) -> list[tuple[int, str]]:
    """(step, key) of local shards that changed between the end of a step and ``before_update`` of the next one."""
    evaluation = evaluation_of(job) if job.evaluation.uri else None
    engine = Engine(job, layout, rank, SyntheticBatches(job), evaluation)
    engine.initialize()
    at_end, changed = pieces(engine), []

    def compare() -> None:
        for key, (_, _, value) in pieces(engine).items():
            if value.tobytes() != at_end[key][2].tobytes():
                changed.append((step, key))

    engine.before_update = compare
    for step in range(1, steps + 1):
        engine.train_step(step)
        at_end = pieces(engine)
    return changed
