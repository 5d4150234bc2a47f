"""The samples of the evaluation loss: the first ones of a data set, in their natural order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from elastic_train.data.dataset import open_dataset
from elastic_train.data.errors import DataError
from elastic_train.data.samples import Slot, padding

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_train.config.job import Job
    from elastic_train.data.dataset import TokenDataset
    from elastic_train.data.manifest import Manifest
    from elastic_train.data.samples import Samples


class EvaluationBatches:
    """Slots of ``micro_batch`` samples; what the last slot lacks is padding."""

    def __init__(self, dataset: Samples, *, samples: int, micro_batch: int) -> None:
        """Raises :class:`DataError` when the data set has fewer than ``samples``."""
        if len(dataset) < samples:
            raise DataError(_too_few(len(dataset), samples))
        self.slots = -(-samples // micro_batch)
        self._dataset, self._samples, self._micro_batch = dataset, samples, micro_batch

    def slot(self, index: int) -> Slot:
        """The micro-batch of a slot; labels are the next tokens."""
        if not 0 <= index < self.slots:
            raise ValueError(f"slot {index} is outside the {self.slots} slots of an evaluation")
        start = index * self._micro_batch
        there = self._dataset.samples(range(start, min(start + self._micro_batch, self._samples)))
        missing = self._micro_batch - len(there.input_ids)
        if not missing:
            return there
        return Slot(*map(np.concatenate, zip(there, padding(missing, self._dataset.sequence_length), strict=True)))

    def padding(self) -> Slot:
        """A micro-batch that counts in no loss."""
        return padding(self._micro_batch, self._dataset.sequence_length)


def open_evaluation(
    job: Job, training: Manifest, on_progress: Callable[[], None] = lambda: None
) -> EvaluationBatches | None:
    """The samples that ``evaluation`` names; None when it names none. ``training``: of the data that is trained on.

    ``on_progress`` is called while documents are packed.

    Raises :class:`DataError`, also when they do not fit, or :class:`~elastic_train.storage.errors.StorageError`.
    """
    if job.evaluation.uri is None:
        return None
    dataset = _open(job, job.evaluation.uri, on_progress)
    problems = _problems(job, dataset, training)
    if problems:
        raise DataError("; ".join(problems))
    return EvaluationBatches(dataset, samples=job.evaluation.samples, micro_batch=job.training.micro_batch)


def unfit_for_evaluation(job: Job, training: Manifest) -> list[str]:
    """Why the job cannot be evaluated, one sentence each; empty when it can. Reads no shard.

    Raises as :func:`open_evaluation` when there is no such data set.
    """
    if job.evaluation.uri is None:
        return []
    return _problems(job, _open(job, job.evaluation.uri), training)


def _open(job: Job, uri: str, on_progress: Callable[[], None] = lambda: None) -> TokenDataset:
    try:
        return open_dataset(uri, job.data, job.storage, on_progress=on_progress)
    except DataError as error:
        raise DataError(f"evaluation.uri={uri}: {error}") from None


def _problems(job: Job, evaluation: TokenDataset, training: Manifest) -> list[str]:
    uri, problems = job.evaluation.uri, []
    if len(evaluation) < job.evaluation.samples:
        problems.append(f"evaluation.uri={uri}: {_too_few(len(evaluation), job.evaluation.samples)}")
    if evaluation.manifest.tokenizer.sha256 != training.tokenizer.sha256:
        problems.append(
            f"evaluation.uri={uri}: its tokenizer ({evaluation.vocab_size} entries) is another one than that of "
            f"data.uri={job.data.first_uri} ({training.tokenizer.vocab_size} entries); prepare it with --tokenizer"
        )
    return problems


def _too_few(there: int, wanted: int) -> str:
    return f"{there} sequences are fewer than evaluation.samples={wanted}; use more text or fewer samples"
