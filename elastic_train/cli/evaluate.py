"""evaluate: the loss of a checkpoint on held-out data."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated

import typer

from elastic_train.cli.guard import UserError
from elastic_train.cli.options import AsJson, CheckpointRef, Endpoint, Region, StorageUri
from elastic_train.cli.selection import Selection, select

if TYPE_CHECKING:
    from elastic_train.config.job import Job


def evaluate(
    checkpoint: CheckpointRef,
    data: Annotated[str | None, typer.Option(metavar="URI", help="Prepared data (default: the job's).")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="The first so many (default: as in the job).")] = None,
    storage: StorageUri = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Compute the loss of a checkpoint on data that it was not trained on, in this process."""
    chosen = select(checkpoint, storage, endpoint_url, region)
    job = _job(chosen, data, samples)

    from elastic_train.controller.checkpoint_evaluation import evaluate_checkpoint

    losses = evaluate_checkpoint(job, chosen.store, chosen.id.step)
    if as_json:
        what = {"job": chosen.name, "step": chosen.id.step, "data": job.evaluation.uri}
        typer.echo(json.dumps({**what, "samples": job.evaluation.samples, **losses}))
        return
    typer.echo(f"{chosen.name}@{chosen.id.step} on {job.evaluation.samples} samples of {job.evaluation.uri}")
    for name, loss in losses.items():
        typer.echo(f"  {name}: {loss:.6g}, perplexity {math.exp(min(loss, 700.0)):.6g}")


def _job(chosen: Selection, data: str | None, samples: int | None) -> Job:
    """The job as its folder's record has it, with the data that were asked for."""
    from elastic_train.config.job import Job
    from elastic_train.controller.job_folder import JobMismatch, read_record

    try:
        job = Job.model_validate(read_record(chosen.store)["config"], strict=False)
    except (JobMismatch, ValueError) as error:
        raise UserError(f"{chosen.store.uri} does not say which job it is of: {' '.join(str(error).split())}") from None
    if data is None and job.evaluation.uri is None:
        raise UserError(f"{chosen.name} has no evaluation.uri; give --data")
    given = {"uri": data, "samples": samples}
    changed = {key: value for key, value in given.items() if value is not None}
    return job.model_copy(update={"evaluation": job.evaluation.model_copy(update=changed)})
