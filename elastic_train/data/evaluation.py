"""The samples of the evaluation loss: the first ones of a data set, in their natural order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from elastic_train.data.batches import PADDING_LABEL, document_numbers
from elastic_train.data.dataset import TokenDataset
from elastic_train.data.errors import DataError
from elastic_train.data.manifest import read_manifest
from elastic_train.storage.store import Store

if TYPE_CHECKING:
    from elastic_train.config.job import Job
    from elastic_train.data.batches import Samples, Tokens
    from elastic_train.data.manifest import Manifest


class EvaluationBatches:
    """Slots of ``micro_batch`` samples; what the last slot lacks is padding."""

    def __init__(self, dataset: Samples, *, samples: int, micro_batch: int) -> None:
        """Raises :class:`DataError` when the data set has fewer than ``samples``."""
        if len(dataset) < samples:
            raise DataError(_too_few(len(dataset), samples))
        self.slots = -(-samples // micro_batch)
        self._dataset, self._samples, self._micro_batch = dataset, samples, micro_batch

    def slot(self, index: int) -> tuple[Tokens, Tokens]:
        """(input_ids, labels) of a slot, int64 [micro_batch, sequence_length]; labels are the next tokens."""
        if not 0 <= index < self.slots:
            raise ValueError(f"slot {index} is outside the {self.slots} slots of an evaluation")
        ids, labels = self.padding()
        start = index * self._micro_batch
        for row, sample in enumerate(range(start, min(start + self._micro_batch, self._samples))):
            tokens = self._dataset.sample(sample)
            ids[row], labels[row] = tokens[:-1], tokens[1:]
        return ids, labels

    def padding(self) -> tuple[Tokens, Tokens]:
        """A micro-batch that counts in no loss."""
        shape = (self._micro_batch, self._dataset.sequence_length)
        return np.zeros(shape, np.int64), np.full(shape, PADDING_LABEL, np.int64)

    def documents(self, input_ids: Tokens) -> Tokens:
        """As of :class:`~elastic_train.data.batches.StepBatches`."""
        return document_numbers(input_ids, self._dataset.eos_id)


def open_evaluation(job: Job, training: TokenDataset) -> EvaluationBatches | None:
    """The samples that ``evaluation`` names; None when it names none.

    Raises :class:`DataError`, also when they do not fit, or :class:`~elastic_train.storage.errors.StorageError`.
    """
    if job.evaluation.uri is None:
        return None
    dataset = TokenDataset.open(job.evaluation.uri, job.data.sequence_length, job.storage)
    problems = _problems(job, dataset.manifest, training.manifest)
    if problems:
        raise DataError("; ".join(problems))
    return EvaluationBatches(dataset, samples=job.evaluation.samples, micro_batch=job.training.micro_batch)


def unfit_for_evaluation(job: Job, training: Manifest) -> list[str]:
    """Why the job cannot be evaluated, told from the manifests alone: one sentence each; empty when it can.

    Raises as :func:`open_evaluation` when there is no such data set.
    """
    if job.evaluation.uri is None:
        return []
    try:
        evaluation, _ = read_manifest(Store.open(job.evaluation.uri, job.storage))
    except DataError as error:
        raise DataError(f"evaluation.uri={job.evaluation.uri}: {error}") from None
    return _problems(job, evaluation, training)


def _problems(job: Job, evaluation: Manifest, training: Manifest) -> list[str]:
    uri, problems = job.evaluation.uri, []
    samples = max(evaluation.tokens - 1, 0) // job.data.sequence_length
    if samples < job.evaluation.samples:
        problems.append(f"evaluation.uri={uri}: {_too_few(samples, job.evaluation.samples)}")
    if evaluation.tokenizer.sha256 != training.tokenizer.sha256:
        problems.append(
            f"evaluation.uri={uri}: its tokenizer ({evaluation.tokenizer.vocab_size} entries) is another one than that "
            f"of data.uri={job.data.uri} ({training.tokenizer.vocab_size} entries); prepare it with --tokenizer"
        )
    return problems


def _too_few(there: int, wanted: int) -> str:
    return f"{there} sequences are fewer than evaluation.samples={wanted}; use more text or fewer samples"
