"""Turns what happens to a job into the tracking writer's messages, and remembers the MLflow run for a resubmission."""

from __future__ import annotations

import asyncio
import math
from typing import Any, Literal

import yaml

from elastic_train.config.job import Job
from elastic_train.controller.job_folder import JobFolder
from elastic_train.controller.tracker import Tracker, tracking_uri

_STATUS: dict[str, Literal["FINISHED", "FAILED", "KILLED"]] = {"finished": "FINISHED", "failed": "FAILED"}
_METRICS = ("loss", "grad_norm", "lr", "seconds", "valid_tokens", "snapshot_seconds", "stall_seconds", "data_seconds")
_EVALUATION = ("eval_loss", "eval_loss_ema", "eval_seconds")
"""Only on the steps after which an evaluation was due."""


class TrackingFeed:
    """The coordinator's only way to MLflow; without a tracking URI it does nothing. No method waits for the server."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tracker: Tracker | None = None

    def start(self, folder: JobFolder) -> None:
        """Start the writer and continue the run of an earlier submission, if there was one."""
        uri = tracking_uri(self._job.tracking, self._job.storage.uri)
        if uri is None or self._tracker is not None:  # the job is opened again, as storage was away
            return
        loop = asyncio.get_running_loop()

        def on_answer(answer: dict[str, Any]) -> None:
            if answer.get("type") == "run":
                loop.call_soon_threadsafe(lambda: folder.decide(mlflow_run_id=answer["run_id"]))

        self._tracker = Tracker(uri, self._job.tracking.experiment, on_answer=on_answer)
        config = self._job.as_dict()
        self._tracker.send(
            {
                "type": "job",
                "name": self._job.name,
                "params": _flat(config),
                "config_yaml": yaml.safe_dump(config, sort_keys=False),
                "run_id": folder.mlflow_run_id(),
                "tags": {"job_folder": folder.store.uri},
            }
        )

    def on_event(self, event: dict[str, Any]) -> None:
        """A line of the ledger, or a finished step (``event`` is "step")."""
        if self._tracker is None:
            return
        if event["event"] == "step":
            names = (*_METRICS, *(name for name in _EVALUATION if name in event))
            metrics = {name: math.nan if event[name] is None else event[name] for name in names}
            metrics["step_seconds"] = metrics.pop("seconds")
            metrics["tokens_per_second"] = event["valid_tokens"] / event["seconds"]
            metrics["generation"] = event["generation"]
            self._tracker.send({"type": "step", "step": event["step"], "time": event["time"], "metrics": metrics})
            return
        if event["event"] == "generation_formed":
            self._tracker.send({**event, "type": "generation"})
        elif event["event"] == "generation_adopted":  # this writer does not know it yet
            known = {key: event[key] for key in ("generation", "layout", "hosts", "cause", "time")}
            self._tracker.send({**known, "type": "generation", "step": event["start_step"]})
        self._tracker.send({**event, "type": "event"})

    def status(self) -> dict[str, Any]:
        """Run id, the command that opens the UI, points delivered and lost, warnings."""
        if self._tracker is None:
            return {}
        result = self._tracker.result
        return {
            "run_id": result.run_id,
            "ui_command": result.ui_command,
            "delivered": result.delivered,
            "lost": result.lost,
            "warnings": result.warnings[-3:],
        }

    async def close(self, state: str) -> dict[str, Any]:
        """End the MLflow run and wait (bounded) for what is still to be delivered."""
        if self._tracker is not None:
            status = _STATUS.get(state, "KILLED")
            await asyncio.get_running_loop().run_in_executor(None, self._tracker.close, status)
        return self.status()


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
