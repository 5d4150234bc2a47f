"""Relative paths of a job file, made absolute before the job leaves the process that read it."""

from __future__ import annotations

import os
from pathlib import Path

from elastic_train.config.data import DataConfig
from elastic_train.config.job import Job

HOME_VARIABLE = "ELASTIC_TRAIN_HOME"
"""Environment variable: the folder that relative paths of a job file start from."""
RAY_UNPACKED = "runtime_resources"
"""Part of the path of a working directory that Ray has unpacked; Ray deletes such folders at will."""


def home() -> Path:
    """The base of relative paths: $ELASTIC_TRAIN_HOME, else the current folder, else (under Ray) ~/elastic_train."""
    given = os.environ.get(HOME_VARIABLE)
    if given:
        return Path(given).expanduser().resolve()
    here = Path.cwd()
    return Path.home() / "elastic_train" if RAY_UNPACKED in here.parts else here


def anchored(job: Job, base: Path) -> Job:
    """The job with relative local paths below ``base``: workers run in folders of their own."""
    data = _anchored_data(job.data, base)
    storage = job.storage.model_copy(update={"uri": _absolute(job.storage.uri, base)})
    evaluation = job.evaluation
    if evaluation.uri is not None:
        evaluation = evaluation.model_copy(update={"uri": _absolute(evaluation.uri, base)})
    tracking = job.tracking.model_copy(update={"uri": _absolute_sqlite(job.tracking.uri, base)})
    source = job.init_from and _absolute(job.init_from, base)
    sections = {"data": data, "storage": storage, "tracking": tracking, "evaluation": evaluation}
    return job.model_copy(update={"init_from": source, **sections})


def _anchored_data(data: DataConfig, base: Path) -> DataConfig:
    uri = data.uri and _absolute(data.uri, base)
    sources = tuple(source.model_copy(update={"uri": _absolute(source.uri, base)}) for source in data.sources)
    return data.model_copy(update={"uri": uri, "sources": sources})


def _absolute_sqlite(uri: str | None, base: Path) -> str | None:
    path = uri.removeprefix("sqlite:///") if uri else ""
    return uri if not path or path == uri else f"sqlite:///{base / path}"


def _absolute(uri: str, base: Path) -> str:
    return uri if "://" in uri else str(base / Path(uri).expanduser())
