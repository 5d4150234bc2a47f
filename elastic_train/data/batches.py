"""The micro-batches of a step, the same for every layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from elastic_train.data.errors import DataError
from elastic_train.data.samples import Slot, padding

if TYPE_CHECKING:
    from elastic_train.config.training import TrainingConfig
    from elastic_train.data.samples import Samples


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
        """Whoever loads slots of a step has the same slots of the next ``prefetch_steps`` steps read ahead.

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
        self._dataset = dataset
        self._order = order
        self._ahead: dict[int, list[int]] = {}
        """by step: the ids that are read ahead"""
        self._ahead_slots = range(0)
        """whose they are"""

    def sample_ids(self, step: int) -> list[int]:
        """The step's sample ids in slot order: slot ``j`` is ``[j * micro_batch, (j + 1) * micro_batch)``."""
        return self._ids(step, range(self.global_batch))

    def load(self, step: int, slots: range) -> list[Slot]:
        """The micro-batches of neighbouring slots of a step; labels are the next tokens."""
        if not 0 <= slots.start <= slots.stop <= self.slots:
            raise ValueError(f"{slots} is outside the {self.slots} slots of a step")
        if not slots:
            return []
        ids, size = self._read_ahead(step, slots), self.micro_batch
        input_ids, labels, documents = self._dataset.samples(ids)
        rows = [slice(first, first + size) for first in range(0, len(ids), size)]
        return [Slot(input_ids[each], labels[each], documents[each]) for each in rows]

    def slot(self, step: int, slot: int) -> Slot:
        """The micro-batch of a slot, by itself: as ``load``."""
        return self.load(step, range(slot, slot + 1))[0]

    def padding(self) -> Slot:
        """A micro-batch that counts in no loss, shaped like a slot."""
        return padding(self.micro_batch, self.sequence_length)

    def _read_ahead(self, step: int, slots: range) -> list[int]:
        """The ids of some slots of a step. Those of the next steps are noted, and read ahead."""
        if not self._prefetch_steps:
            return self._ids_of(step, slots)
        last = max(min(step + self._prefetch_steps, self._steps), step)
        for other in [*self._ahead]:
            if slots != self._ahead_slots or not step <= other <= last:
                self._dataset.forget(self._ahead.pop(other))
        self._ahead_slots = slots
        for following in range(step, last + 1):  # the step itself, if it was not foreseen: its batches side by side
            if following not in self._ahead:
                self._ahead[following] = self._ids_of(following, slots)
                self._dataset.prefetch(self._ahead[following])
        return self._ahead.pop(step)

    def _ids_of(self, step: int, slots: range) -> list[int]:
        return self._ids(step, range(slots.start * self.micro_batch, slots.stop * self.micro_batch))

    def _ids(self, step: int, places: range) -> list[int]:
        if step < 1:
            raise ValueError(f"step {step} is not accepted; steps are counted from 1")
        start = (step - 1) * self.global_batch
        return [self._order.sample_id(start + place) for place in places]
