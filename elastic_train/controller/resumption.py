"""Opening a job: does its data fit, and where does an earlier submission's work go on?"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

from elastic_train.checkpoint.claims import FRESH, Claim, announce, first_claim, go_on_from
from elastic_train.checkpoint.hf_source import keep_source
from elastic_train.checkpoint.manifest import FOLDER, CheckpointId
from elastic_train.checkpoint.retention import set_aside
from elastic_train.checkpoint.verify import choose_checkpoint
from elastic_train.config.job import Job
from elastic_train.data.errors import DataError
from elastic_train.data.evaluation import unfit_for_evaluation
from elastic_train.data.sources import open_training
from elastic_train.model.hf_folder import check_tokenizer, open_source
from elastic_train.storage.errors import AlreadyExists
from elastic_train.storage.store import Store


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Where the holder of ``claim`` goes on; ``checkpoint`` is None when there is none to load.

    ``refused`` has a sentence for each newer checkpoint that was passed over.
    """

    claim: Claim
    checkpoint: CheckpointId | None
    refused: list[str] = field(default_factory=list)


def take_over(store: Store, holder: str, created: float) -> TakenOver:
    """Become the one whose commits count, and go on from the newest checkpoint that is whole.

    Raises:
        Fenced: somebody else takes over at this very moment.
        StorageError, CheckpointError: the job folder cannot be read or written.
    """
    if not store.list(FOLDER):  # nobody has been here, so there is nobody to fence off and nothing to choose from
        with suppress(AlreadyExists):
            return TakenOver(first_claim(store, holder, created), None)
    return fall_back(store, announce(store, holder, created), created)


def fall_back(store: Store, claim: Claim, created: float, damaged: Collection[CheckpointId] = ()) -> TakenOver:
    """Go on from the newest checkpoint that is whole and not in ``damaged``, under the claim after ``claim``.

    A new claim even when the holder stays the same: by it the refused ones count no longer, so that their steps can be
    committed anew, whatever becomes of the manifests that are then put out of the way.
    """
    chosen = choose_checkpoint(store, exclude=damaged)
    checkpoint = chosen.manifest.id if chosen.manifest else None
    claim = go_on_from(store, claim, checkpoint.step if checkpoint else FRESH, created)
    for refused in [*damaged, *chosen.refused_ids]:
        set_aside(store, refused, claim)
    return TakenOver(claim, checkpoint, chosen.refused)


@dataclass(frozen=True, slots=True)
class OpenedData:
    """``digest`` is of the data's manifests, ``tokenizer_sha256`` that of the tokenizer.

    ``sample_ids`` gives a step's ids in slot order.
    """

    digest: str
    tokenizer_sha256: str
    sample_ids: Callable[[int], list[int]]


def open_data(job: Job) -> OpenedData:
    """Read the manifests of the job's data (no shard).

    Raises:
        DataError: there is none, or it does not fit the job; or the evaluation's data set does not.
    """
    data = open_training(job)
    problems = unfit_for_evaluation(job, data.datasets[0].manifest)
    if problems:
        raise DataError("; ".join(problems))
    return OpenedData(data.digest, data.tokenizer_sha256, data.batches.sample_ids)


def begin_from_source(job: Job, data: OpenedData, store: Store) -> None:
    """Check the folder of ``init_from``, if the job has one, and keep its small files in the job folder ``store``.

    Raises ConfigError when the folder is not a whole model, not the job's model, or has not the data's tokenizer.
    """
    source = open_source(job)
    if source is not None:
        check_tokenizer(source, data.tokenizer_sha256, job.data.first_uri)
        keep_source(source, store)
