"""In-memory samples and small jobs for engine tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_train.config.job import Job
from elastic_train.data.samples import Slot, document_numbers


class SyntheticBatches:
    """Random tokens that are a function of (step, sample) only, so that every layout sees the same ones.

    ``masked``: largest fraction of labels that are padding, different per sample. ``empty_rows``: rows of the global
    batch without any valid label. ``planted``: (step, row, token) to put in the middle of that row, or with ``last``
    at its end, where it is a label only. ``below``: limit of the other tokens; ``above``: the smallest of them.
    ``lengths``: of the documents in every row, instead of what the tokens say.
    """

    def __init__(
        self,
        job: Job,
        masked: float = 0.0,
        empty_rows: tuple[int, ...] = (),
        planted: tuple[int, int, int] | None = None,
        below: int | None = None,
        above: int = 0,
        lengths: tuple[int, ...] | None = None,
        last: bool = False,
    ) -> None:
        self._job = job
        self._planted = planted
        self._below = below or job.model.vocab_size
        self._above = above
        self._masked = masked
        self._empty_rows = empty_rows
        self._lengths = lengths
        self._last = last

    def sample_ids(self, step: int) -> list[int]:
        batch = self._job.training.global_batch
        return list(range((step - 1) * batch, step * batch))

    def load(self, step: int, slots: range) -> list[Slot]:
        return [self.slot(step, index) for index in slots]

    def slot(self, step: int, index: int) -> Slot:
        size = self._job.training.micro_batch
        rows = [self._row(step, index * size + row) for row in range(size)]
        ids, labels = (np.stack(arrays) for arrays in zip(*rows, strict=True))
        return Slot(ids, labels, self._documents(ids))

    def padding(self) -> Slot:
        shape = (self._job.training.micro_batch, self._job.data.sequence_length)
        ids = np.zeros(shape, dtype=np.int64)
        return Slot(ids, np.full(shape, -100, dtype=np.int64), self._documents(ids))

    def _documents(self, input_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """A document ends at each token 0, as often as the skew of the tokens makes it, or as ``lengths`` says."""
        if self._lengths is not None:
            numbers = np.repeat(np.arange(len(self._lengths)), self._lengths)
            return np.broadcast_to(numbers, input_ids.shape).copy()
        return document_numbers(input_ids, 0)

    def _row(self, step: int, row: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        random = np.random.default_rng((step, row))
        # Skewed towards small ids: there is something to learn, so the loss moves.
        tokens = (random.random(self._job.data.sequence_length + 1) ** 2 * self._below).astype(np.int64)
        tokens = np.maximum(tokens, self._above)
        if self._planted is not None and (step, row) == self._planted[:2]:
            tokens[-1 if self._last else len(tokens) // 2] = self._planted[2]
        labels = tokens[1:].copy()
        labels[random.random(labels.shape) < self._masked * random.random()] = -100
        if row in self._empty_rows:
            labels[:] = -100
        return tokens[:-1], labels


def small_job(**sections: dict[str, Any]) -> Job:
    """A job of 4 layers and 8 samples a step; ``sections`` override fields, e.g. ``model={"vocab_size": 99}``.

    With ``lora`` it has an ``init_from``, which an engine does not look at.
    """
    values: dict[str, Any] = {
        "name": "small",
        "seed": 1,
        "model": {
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "vocab_size": 256,
        },
        "data": {"uri": "memory", "sequence_length": 32},
        "training": {"steps": 20, "global_batch": 8, "micro_batch": 1},
        "optimizer": {"learning_rate": 1e-3, "eps": 1e-6},
        "schedule": {"warmup_steps": 5, "min_lr": 1e-4},
    }
    for section, fields in sections.items():
        values[section] = {**values.get(section, {}), **fields}
    if "lora" in sections:
        values["init_from"] = "a folder"
    return Job.model_validate(values)
