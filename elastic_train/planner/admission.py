"""The gate of every command that takes a job file: what passes here can be launched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from elastic_train.config.errors import ConfigError
from elastic_train.config.job import Job
from elastic_train.config.load import load_job
from elastic_train.planner.layouts import check_job


def admit_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """Load a job file and check that a layout exists for it. Raises ConfigError with every problem found."""
    job = load_job(path, overrides)
    problems = check_job(job)
    if problems:
        raise ConfigError(problems)
    return job
