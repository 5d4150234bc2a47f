"""What the ranks of ``test_state_keys`` do; runs inside a gloo group."""

from __future__ import annotations

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.training.engine import Engine
from tests.training.synthetic import SyntheticBatches


def keys_of_engines(rank: int, jobs: list[Job], layout: Layout) -> list[set[str]]:
    """The state's keys of one engine after another."""
    return [set(Engine(job, layout, rank, SyntheticBatches(job)).state()) for job in jobs]
