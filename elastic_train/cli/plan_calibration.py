"""``elastic-train plan --calibrate``: what a finished run says about the machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from elastic_train.cli.guard import UserError

if TYPE_CHECKING:
    from elastic_train.cli.plan_question import Question
    from elastic_train.config.job import Job
    from elastic_train.planner.calibration import Calibration
    from elastic_train.planner.hardware import Accelerator
    from elastic_train.storage.store import Store


def calibrated(
    question: Question, run: str, storage: str | None, endpoint_url: str | None, region: str | None
) -> tuple[Question, list[str]]:
    """The question with speeds of ``run`` (a job's name, file or folder), and what was found. Raises UserError."""
    from elastic_train.cli.folder import open_folder
    from elastic_train.planner.calibration import NothingToLearn, calibrate
    from elastic_train.storage.json_lines import read_json_lines

    name, store = open_folder(run, storage, endpoint_url, region)
    steps, ledger = read_json_lines(store, "steps.jsonl"), read_json_lines(store, "ledger.jsonl")
    job = _job_of(store)
    if job.hosts.device != (mine := question.job.hosts.device):
        raise UserError(f"--calibrate {run}: it ran on {job.hosts.device} and the question is about {mine}")
    try:
        found = calibrate(job, steps, ledger, question.accelerator)
    except NothingToLearn as error:
        raise UserError(f"--calibrate {run}: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"--calibrate {run}: steps.jsonl is not the log of a run: {error!r}") from None
    _check_fit(run, question.accelerator, found)
    told = list(_lines(name, question.accelerator, found))
    return replace(question, accelerator=found.accelerator), told


def _check_fit(run: str, chip: Accelerator, found: Calibration) -> None:
    from elastic_train.planner.calibration import WORST

    own = "describe the machine that it ran on in a YAML file and give that as --gpu"
    if found.at_a_bound:
        raise UserError(
            f"--calibrate {run}: no speed of {chip.name} explains its steps (efficiency "
            f"{found.accelerator.efficiency:.3g}, links x {found.link_factor:.3g}); {own}"
        )
    if found.worst > WORST:
        raise UserError(
            f"--calibrate {run}: with the speeds that fit best a step is still {found.worst:.0%} off, more than "
            f"{WORST:.0%}; {own}"
        )


def _job_of(store: Store) -> Job:
    """The job as the folder's record has it."""
    from pydantic import ValidationError

    from elastic_train.config.job import Job
    from elastic_train.controller.job_folder import JobMismatch, read_record
    from elastic_train.storage.errors import NotFound

    try:
        record = read_record(store)
        return Job.model_validate(record["config"], strict=False)
    except NotFound:
        raise UserError(f"{store.uri} has no job.json: it is not known which model was trained there") from None
    except JobMismatch as error:
        raise UserError(str(error)) from None
    except ValidationError as error:
        raise UserError(f"{store.uri}/job.json is not the record of a job: {' '.join(str(error).split())}") from None


def _lines(name: str, before: Accelerator, found: Calibration) -> Iterator[str]:
    after = found.accelerator
    yield (
        f"calibrated from {name}: efficiency {after.efficiency:.3g} (was {before.efficiency:.3g}), "
        f"links x {found.link_factor:.3g}"
    )
    for measured, predicted in found.fits:
        yield (
            f"  {measured.layout}: {measured.seconds:.4g} s a step in {measured.steps} steps; "
            f"predicted now {predicted:.4g} s"
        )
    if found.goodput is not None:
        yield f"  goodput of that run: {found.goodput:.1%}; days and cost here are of a run without any loss"
