"""The micro-batches of a step, the same for every layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from elastic_train.data.errors import DataError

if TYPE_CHECKING:
    from elastic_train.config.training import TrainingConfig
    from elastic_train.data.order import SampleOrder

    Tokens = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

PADDING_LABEL = -100
"""Label of a position that counts in no loss."""


class Samples(Protocol):
    """What a batch is made of; :class:`~elastic_train.data.dataset.TokenDataset` is one."""

    @property
    def sequence_length(self) -> int: ...

    @property
    def eos_id(self) -> int: ...

    def __len__(self) -> int: ...

    def sample(self, index: int) -> Tokens:
        """int64 [sequence_length + 1]"""
        ...


def slots_of(data_rank: int, data_ranks: int, slots: int) -> range:
    """The contiguous slots that ``data_rank`` computes; the first ``slots % data_ranks`` ranks get one more."""
    if not 0 <= data_rank < data_ranks:
        raise ValueError(f"data rank {data_rank} is outside the {data_ranks} data ranks")
    each, more = divmod(slots, data_ranks)
    start = data_rank * each + min(data_rank, more)
    return range(start, start + each + (data_rank < more))


def document_numbers(input_ids: Tokens, eos_id: int) -> Tokens:
    """Number, from 0 in each sequence, of the document that a token is in; int64, of the shape of ``input_ids``.

    A document ends with its end-of-text token. The label there is the first token of the next document: it is
    predicted from the document that ends, and counts in the loss.
    """
    ends = np.zeros_like(input_ids)
    ends[..., 1:] = input_ids[..., :-1] == eos_id
    return np.cumsum(ends, axis=-1)


class StepBatches:
    """Step ``t`` (from 1) trains on global indices ``[(t - 1) * global_batch, t * global_batch)``.

    An epoch may end inside a step; the step then goes on with the next epoch's first samples.
    """

    def __init__(self, dataset: Samples, order: SampleOrder, training: TrainingConfig) -> None:
        """Raises :class:`DataError` when the data set has fewer sequences than one global batch."""
        if len(dataset) < training.global_batch:
            raise DataError(
                f"{len(dataset)} sequences < global batch {training.global_batch}: "
                f"the data set gives {len(dataset)} sequences of {dataset.sequence_length} tokens; use more text, "
                "a shorter data.sequence_length or a smaller training.global_batch"
            )
        if order.num_samples != len(dataset):
            raise ValueError(f"the order is over {order.num_samples} samples, the data set has {len(dataset)}")
        self.sequence_length = dataset.sequence_length
        self.global_batch = training.global_batch
        self.micro_batch = training.micro_batch
        self.slots = training.slots
        self._dataset = dataset
        self._order = order

    def sample_ids(self, step: int) -> list[int]:
        """The step's sample ids in slot order: slot ``j`` is ``[j * micro_batch, (j + 1) * micro_batch)``."""
        return self._ids(step, range(self.global_batch))

    def slot(self, step: int, slot: int) -> tuple[Tokens, Tokens]:
        """(input_ids, labels) of a slot, int64 [micro_batch, sequence_length]; labels are the next tokens."""
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot} is outside the {self.slots} slots of a step")
        ids = self._ids(step, range(slot * self.micro_batch, (slot + 1) * self.micro_batch))
        tokens = np.stack([self._dataset.sample(index) for index in ids])
        return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])

    def padding(self) -> tuple[Tokens, Tokens]:
        """A micro-batch that counts in no loss: zeros and :data:`PADDING_LABEL`, shaped like a slot."""
        shape = (self.micro_batch, self.sequence_length)
        return np.zeros(shape, np.int64), np.full(shape, PADDING_LABEL, np.int64)

    def documents(self, input_ids: Tokens) -> Tokens:
        """The document that each token is in, as :func:`document_numbers` counts."""
        return document_numbers(input_ids, self._dataset.eos_id)

    def _ids(self, step: int, places: range) -> list[int]:
        if step < 1:
            raise ValueError(f"step {step} is not accepted; steps are counted from 1")
        start = (step - 1) * self.global_batch
        return [self._order.sample_id(start + place) for place in places]
