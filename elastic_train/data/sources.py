"""What a job trains on: its data set, or the mixture of several, and why they may not do."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from elastic_train.data.batch_memory import BatchMemory
from elastic_train.data.batches import StepBatches, too_few
from elastic_train.data.dataset import open_dataset
from elastic_train.data.errors import DataError
from elastic_train.data.evaluation import unfit_for_evaluation
from elastic_train.data.mixture import MixedOrder, Mixture
from elastic_train.data.order import SampleOrder
from elastic_train.data.samples import Slot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from elastic_train.config.data import SourceConfig
    from elastic_train.config.job import Job
    from elastic_train.data.dataset import TokenDataset
    from elastic_train.data.samples import Samples


class JoinedDatasets:
    """Samples of several data sets, one data set's after those of the ones before."""

    def __init__(self, datasets: Sequence[TokenDataset], order: MixedOrder) -> None:
        """``order``: of their samples, which says what is whose."""
        self._datasets, self._order = datasets, order
        self.sequence_length = datasets[0].sequence_length

    def __len__(self) -> int:
        return self._order.num_samples

    def samples(self, indices: Sequence[int]) -> Slot:
        """As of :class:`~elastic_train.data.dataset.TokenDataset`."""
        joined = Slot(*(np.empty((len(indices), self.sequence_length), np.int64) for _ in Slot._fields))
        for dataset, rows, own in self._by_dataset(indices):
            for array, part in zip(joined, dataset.samples(own), strict=True):
                array[rows] = part
        return joined

    def prefetch(self, indices: Sequence[int]) -> None:
        """As of :class:`~elastic_train.data.dataset.TokenDataset`."""
        for dataset, _, own in self._by_dataset(indices):
            dataset.prefetch(own)

    def forget(self, indices: Sequence[int]) -> None:
        """As of :class:`~elastic_train.data.dataset.TokenDataset`."""
        for dataset, _, own in self._by_dataset(indices):
            dataset.forget(own)

    def _by_dataset(self, indices: Sequence[int]) -> list[tuple[TokenDataset, list[int], list[int]]]:
        """Each data set that samples are of, with their places in ``indices`` and their numbers in it."""
        found: dict[int, tuple[TokenDataset, list[int], list[int]]] = {}
        for place, index in enumerate(indices):
            if not 0 <= index < len(self):
                raise IndexError(f"sample {index} is outside the {len(self)} samples")
            number, own = self._order.source_of(index)
            _, places, numbers = found.setdefault(number, (self._datasets[number], [], []))
            places.append(place)
            numbers.append(own)
        return [*found.values()]


@dataclass(frozen=True, slots=True)
class TrainingData:
    """``digest`` covers the manifests of all data sets; of one it is its manifest's sha256."""

    datasets: tuple[TokenDataset, ...]
    order: MixedOrder
    batches: StepBatches
    digest: str

    @property
    def tokenizer_sha256(self) -> str:
        """Of the tokenizer that all data sets have."""
        return self.datasets[0].manifest.tokenizer.sha256


def open_training(job: Job, on_progress: Callable[[], None] = lambda: None) -> TrainingData:
    """Open the job's data: manifests, and no shard. ``on_progress`` is called while documents are packed.

    Raises:
        DataError: there is none, or it does not fit the job (each reason a sentence).
        StorageError: the store does not answer.
    """
    datasets = _open(job, on_progress)
    problems = [*_problems(job, datasets)]
    if problems:
        raise DataError("; ".join(problems))
    order = _order(job, datasets)
    samples: Samples = datasets[0] if len(datasets) == 1 else JoinedDatasets(datasets, order)
    batches = StepBatches(samples, order, job.training, job.data.prefetch_steps)
    return TrainingData(datasets, order, batches, _digest(job, datasets))


def data_problems(job: Job) -> list[str]:
    """Why the job cannot be trained and evaluated on its data, one sentence each; empty when it can.

    Raises as :func:`open_training` where there is no data set.
    """
    datasets = _open(job)
    return [*_problems(job, datasets), *unfit_for_evaluation(job, datasets[0].manifest)]


def _open(job: Job, on_progress: Callable[[], None] = lambda: None) -> tuple[TokenDataset, ...]:
    memory = BatchMemory()
    return tuple(
        open_dataset(source.uri, job.data, job.storage, memory, on_progress) for source in job.data.all_sources
    )


def _order(job: Job, datasets: Sequence[TokenDataset]) -> MixedOrder:
    if job.data.uri is not None:
        return MixedOrder(_mixture(job), [SampleOrder(len(datasets[0]), job.seed)])
    orders = [
        SampleOrder(len(dataset), f"{job.seed} {source.name}")
        for source, dataset in zip(job.data.sources, datasets, strict=True)
    ]
    return MixedOrder(_mixture(job), orders)


def _mixture(job: Job) -> Mixture:
    """Raises ValueError for a weight that is too small."""
    sources = job.data.all_sources
    weights = [(0, [source.weight for source in sources])]
    for phase in job.data.phases:
        start = (phase.from_step - 1) * job.training.global_batch
        weights.append((start, [phase.weights[source.name] for source in sources]))
    return Mixture(weights, job.seed)


def _digest(job: Job, datasets: Sequence[TokenDataset]) -> str:
    if job.data.uri is not None:
        return datasets[0].digest
    lines = [f"{source.name} {dataset.digest}\n" for source, dataset in zip(job.data.sources, datasets, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _problems(job: Job, datasets: Sequence[TokenDataset]) -> Iterator[str]:
    length, batch = job.data.sequence_length, job.training.global_batch
    samples = sum(len(dataset) for dataset in datasets)
    if samples < batch:
        where = f"data.uri={job.data.uri}" if job.data.uri is not None else "data.sources"
        yield f"{where}: {too_few(samples, length, batch)}"
    for source, dataset in zip(job.data.all_sources, datasets, strict=True):
        yield from _problems_of(job, _named(job, source), dataset, datasets[0])
    documents = sum(dataset.manifest.documents for dataset in datasets)
    if job.data.separates_documents and documents < 2:
        field = "data.document_mask=true" if job.data.document_mask else "data.packing=documents"
        yield (
            f"{field}: {_named(job, job.data.all_sources[0])} holds {documents} document: there is nothing "
            "to mask; prepare it from a file per document, or leave it out"
        )
    if all(len(dataset) for dataset in datasets):
        yield from _mixture_problems(job, datasets)


def _named(job: Job, source: SourceConfig) -> str:
    return f"data.uri={source.uri}" if job.data.uri is not None else f"source {source.name} ({source.uri})"


def _problems_of(job: Job, name: str, dataset: TokenDataset, first: TokenDataset) -> Iterator[str]:
    vocabulary, theirs = dataset.vocab_size, dataset.manifest.tokenizer.sha256
    if vocabulary > job.model.vocab_size:
        yield f"model.vocab_size={job.model.vocab_size}: must be at least {vocabulary}, the vocabulary of {name}"
    if theirs != first.manifest.tokenizer.sha256:
        yield (
            f"{name}: its tokenizer ({vocabulary} entries) is another one than that of source "
            f"{job.data.all_sources[0].name} ({first.vocab_size} entries); prepare it with --tokenizer"
        )
    if job.data.sources and not len(dataset):
        yield f"{name}: gives no sequence of {job.data.sequence_length} tokens; use more text, or leave it out"


def _mixture_problems(job: Job, datasets: Sequence[TokenDataset]) -> Iterator[str]:
    """Weights that are too small, and sources that are to stop and would."""
    try:
        mixture = _mixture(job)
    except ValueError as error:
        yield f"data.sources: {error}; use a larger weight, or leave the source out"
        return
    for number, (source, dataset) in enumerate(zip(job.data.all_sources, datasets, strict=True)):
        last = _last_step(mixture, number, len(dataset), job) if source.exhausted == "stop" else None
        if last is not None:
            yield (
                f"{_named(job, source)}: exhausted=stop, and its {len(dataset)} samples end in step {last} of "
                f"training.steps={job.training.steps}; use fewer steps, a smaller weight, more text, or repeat"
            )


def _last_step(mixture: Mixture, source: int, samples: int, job: Job) -> int | None:
    """The step in which a source of so many samples has no more; None if they are enough."""

    def lacks(step: int) -> bool:
        return mixture.used(source, step * job.training.global_batch) > samples

    steps = range(1, job.training.steps + 1)
    return steps[bisect_left(steps, True, key=lacks)] if lacks(steps[-1]) else None
