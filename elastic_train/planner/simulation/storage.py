"""How long checkpoints take to be written and read: their bytes over the bandwidth of the storage."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.planner.activations import FLOAT32
from elastic_train.planner.model_state import model_state, numbers_of
from elastic_train.planner.parameters import stages_of_ranks

WRITE_PER_HOST, READ_PER_HOST = 164e6, 929e6
"""Bytes per second of one host: docs/benchmarks.md "Checkpoints", 2,000 MB on one rank."""
BYTES_PER_HOST = 10e9
"""Assumed where nobody says how large the model is: an eighth of a GPU of 80 GB."""


@dataclass(frozen=True, slots=True)
class Storage:
    """``nbytes`` of one checkpoint; ``write`` and ``read`` in bytes per second, of all hosts together."""

    nbytes: float
    write: float
    read: float

    @property
    def save_seconds(self) -> float:
        """From the beginning of an upload until it is committed."""
        return self.nbytes / self.write

    @property
    def load_seconds(self) -> float:
        """Until every host has read its part."""
        return self.nbytes / self.read


def checkpoint_bytes(job: Job) -> int:
    """Of ``job``'s state as it is saved: float32 weights, the optimizer's state, averaged weights.

    Frozen weights are in the precision of compute.
    """
    alone = Layout()
    (stages,) = stages_of_ranks(job.model, job.parallel, alone, job.data.sequence_length, job.lora)
    state = model_state(job, alone, stages)
    trained = sum(stage.trained.whole for stage in stages)
    frozen = sum(stage.whole for stage in stages) - trained
    weights = FLOAT32 * trained + numbers_of(job).compute * frozen
    return weights + state.get("optimizer state", 0) + state.get("averaged weights", 0)
