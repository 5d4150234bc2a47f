"""The micro-batches of a step, the same for every layout."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from elastic_train.data.errors import DataError
from elastic_train.data.samples import padding, stack

if TYPE_CHECKING:
    from elastic_train.config.training import TrainingConfig
    from elastic_train.data.samples import Samples, Slot


class Order(Protocol):
    """Which sample comes at which place of training (``order.SampleOrder``, ``mixture.MixedOrder``)."""

    @property
    def num_samples(self) -> int: ...

    def sample_id(self, n: int) -> int: ...


def slots_of(data_rank: int, data_ranks: int, slots: int) -> range:
    """The contiguous slots that ``data_rank`` computes; the first ``slots % data_ranks`` ranks get one more."""
    if not 0 <= data_rank < data_ranks:
        raise ValueError(f"data rank {data_rank} is outside the {data_ranks} data ranks")
    each, more = divmod(slots, data_ranks)
    start = data_rank * each + min(data_rank, more)
    return range(start, start + each + (data_rank < more))


def too_few(samples: int, sequence_length: int, global_batch: int) -> str:
    """Why there cannot be a step."""
    return (
        f"{samples} sequences of {sequence_length} tokens are fewer than training.global_batch={global_batch}; "
        "use more text, a shorter data.sequence_length or a smaller training.global_batch"
    )


class StepBatches:
    """Step ``t`` (from 1) trains on global indices ``[(t - 1) * global_batch, t * global_batch)``.

    An epoch may end inside a step; the step then goes on with the next epoch's first samples.
    """

    def __init__(self, dataset: Samples, order: Order, training: TrainingConfig, prefetch_steps: int = 0) -> None:
        """Whoever asks for a slot of a step has the same slot of the next ``prefetch_steps`` steps read ahead.

        Raises :class:`DataError` when the data set has fewer sequences than one global batch.
        """
        if len(dataset) < training.global_batch:
            raise DataError(too_few(len(dataset), dataset.sequence_length, training.global_batch))
        if order.num_samples != len(dataset):
            raise ValueError(f"the order is over {order.num_samples} samples, the data set has {len(dataset)}")
        self.sequence_length = dataset.sequence_length
        self.global_batch = training.global_batch
        self.micro_batch = training.micro_batch
        self.slots = training.slots
        self._steps, self._prefetch_steps = training.steps, prefetch_steps
        self._planned: dict[int, int] = {}
        """by slot: the last step of which it is read ahead"""
        self._dataset = dataset
        self._order = order
        self._ids_of = lru_cache(2 * self.slots * (prefetch_steps + 1))(self._ids_in)  # ahead, and when used

    def sample_ids(self, step: int) -> list[int]:
        """The step's sample ids in slot order: slot ``j`` is ``[j * micro_batch, (j + 1) * micro_batch)``."""
        return self._ids(step, range(self.global_batch))

    def slot(self, step: int, slot: int) -> Slot:
        """The micro-batch of a slot; labels are the next tokens."""
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot} is outside the {self.slots} slots of a step")
        self._read_ahead(step, slot)
        return stack([self._dataset.sample(index) for index in self._ids_of(step, slot)])

    def padding(self) -> Slot:
        """A micro-batch that counts in no loss, shaped like a slot."""
        return stack([padding(self.sequence_length)] * self.micro_batch)

    def _read_ahead(self, step: int, slot: int) -> None:
        last, planned = min(step + self._prefetch_steps, self._steps), self._planned.get(slot, 0)
        for following in range(max(step, planned if planned <= last else 0) + 1, last + 1):
            for index in self._ids_of(following, slot):
                self._dataset.prefetch(index)
        self._planned[slot] = last

    def _ids_in(self, step: int, slot: int) -> list[int]:
        return self._ids(step, range(slot * self.micro_batch, (slot + 1) * self.micro_batch))

    def _ids(self, step: int, places: range) -> list[int]:
        if step < 1:
            raise ValueError(f"step {step} is not accepted; steps are counted from 1")
        start = (step - 1) * self.global_batch
        return [self._order.sample_id(start + place) for place in places]
