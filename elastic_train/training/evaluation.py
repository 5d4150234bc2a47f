"""Which samples of an evaluation a rank computes, and when. Forward passes and sums are the engine's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from elastic_train.config.job import Job
from elastic_train.data.batches import slots_of
from elastic_train.data.samples import Slot


class EvaluationSamples(Protocol):
    """Where the engine gets the samples of an evaluation (``data.evaluation.EvaluationBatches``)."""

    slots: int

    def slot(self, index: int) -> Slot: ...

    def padding(self) -> Slot: ...


def is_due(job: Job, step: int) -> bool:
    """Whether the weights after ``step`` are evaluated: every so many steps, and at the end."""
    return job.evaluation.uri is not None and (step % job.evaluation.every_steps == 0 or step == job.training.steps)


def rounds(samples: EvaluationSamples, data_rank: int, data_ranks: int, most: int) -> Iterator[list[Slot]]:
    """A data rank's share in rounds of at most ``most`` micro-batches: as many on every rank, the last ones padding."""
    own = slots_of(data_rank, data_ranks, samples.slots)
    share = -(-samples.slots // data_ranks)
    for start in range(0, share, most):
        loaded = [samples.slot(slot) for slot in own[start : start + most]]
        yield loaded + [samples.padding()] * (min(most, share - start) - len(loaded))
