"""One job as MLflow sees it: a parent run for the job, nested in it a run per generation.

The parent has every metric of every step, the parameters, the files and the description that tells the story. A
generation's run has its layout, cause and recovery times, and loss and tokens/s of its own steps, so that the
generations can be laid over each other in the UI. Repeating a call after a lost answer changes nothing, and the writer
of a coordinator that comes back continues the run of the generation that goes on.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from elastic_train.tracking.redact import redact
from elastic_train.tracking.story import Story, layout_text
from elastic_train.tracking.time_plot import TimeHistory, plot_time

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run

VALUE_LIMIT = 6000
"""MLflow's longest parameter value, in characters."""
METRICS_PER_BATCH, PARAMS_PER_BATCH = 1000, 100
PLANNED = (None, "start", "growth")
"""Causes of a generation that leave the one before it finished, not killed."""
CHILD_METRICS = ("loss", "tokens_per_second")
JOB_TAG, GENERATION_TAG, ATTEMPT_TAG = "elastic_train.job", "elastic_train.generation", "elastic_train.attempt"
PARENT_TAG, NOTE_TAG = "mlflow.parentRunId", "mlflow.note.content"
PERMANENT = frozenset(
    {
        "BAD_REQUEST",
        "CUSTOMER_UNAUTHORIZED",
        "ENDPOINT_NOT_FOUND",
        "FEATURE_DISABLED",
        "INVALID_PARAMETER_VALUE",
        "INVALID_STATE",
        "PERMISSION_DENIED",
        "RESOURCE_ALREADY_EXISTS",
        "RESOURCE_DOES_NOT_EXIST",
        "UNAUTHENTICATED",
    }
)
"""MLflow's error codes for which sending the same again is of no use."""


class Refused(Exception):
    """The server answers, and says no."""


class Unreachable(Exception):
    """The server does not answer now; the same call may work later."""


class RunStore:
    """The runs of one job. Every method may raise Refused or Unreachable; none is safe to call from two threads."""

    def __init__(self, uri: str, experiment: str) -> None:
        # The client is made here and not at import: `import mlflow` takes seconds of CPU.
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=uri)
        self._uri, self._experiment = uri, experiment
        self._attempt = uuid.uuid4().hex
        self._children: dict[int, str] = {}
        self._current: int | None = None
        self._nan_steps = 0
        self._time = TimeHistory()
        self.experiment_id = ""
        self.run_id = ""

    def open(self, message: Mapping[str, Any]) -> None:
        """Make or continue the parent run of a ``job`` message and log its parameters."""
        name = str(message["name"])
        self._story = Story(name)
        self.experiment_id = self._experiment_id()
        run = self._continued(message.get("run_id")) or self._created(name, {ATTEMPT_TAG: self._attempt})
        self.run_id = run.info.run_id
        self._log_tags(self.run_id, {JOB_TAG: name})
        self._nan_steps = int(run.data.metrics.get("nan_steps", 0))
        params = {key: "" if value is None else str(value) for key, value in (message.get("params") or {}).items()}
        self._log_params(params, run.data.params)
        self._log_tags(self.run_id, message.get("tags") or {})
        config = message.get("config_yaml") or "\n".join(f"{key}: {value}" for key, value in params.items()) + "\n"
        self._call(self._client.log_text, self.run_id, config, "config.yaml")

    def _experiment_id(self) -> str:
        experiment = self._call(self._client.get_experiment_by_name, self._experiment)
        if experiment is not None:
            return str(experiment.experiment_id)
        try:
            return str(self._call(self._client.create_experiment, self._experiment, artifact_folder(self._uri)))
        except Refused:  # someone else made it in the meantime
            experiment = self._call(self._client.get_experiment_by_name, self._experiment)
            if experiment is None:
                raise
            return str(experiment.experiment_id)

    def _continued(self, run_id: str | None) -> Run | None:
        if not run_id:
            return None
        try:
            run: Run = self._call(self._client.get_run, run_id)
            self.experiment_id = run.info.experiment_id
            self._call(self._client.update_run, run_id, "RUNNING")
        except Refused:  # the run was deleted, or is on another server: start a new one
            return None
        return run

    def _created(self, name: str, tags: dict[str, str]) -> Run:
        """A new run, or the one with all of these ``tags``: an earlier call, or an earlier writer, has made it."""
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        found: Sequence[Run] = self._call(self._client.search_runs, [self.experiment_id], query)
        if found:
            return found[0]
        run: Run = self._call(self._client.create_run, self.experiment_id, tags=tags, run_name=name)
        return run

    def _log_params(self, params: Mapping[str, str], known: Mapping[str, str]) -> None:
        """New parameters; one that a resubmission changed cannot be overwritten and becomes a tag."""
        from mlflow.entities import Param

        shown = {key: shorten(value) for key, value in params.items()}
        fresh = [Param(key, value) for key, value in shown.items() if key not in known]
        for start in range(0, len(fresh), PARAMS_PER_BATCH):
            self._call(self._client.log_batch, self.run_id, params=fresh[start : start + PARAMS_PER_BATCH])
        changed = {f"changed.{key}": value for key, value in shown.items() if known.get(key, value) != value}
        self._log_tags(self.run_id, changed)

    def _log_tags(self, run_id: str, tags: Mapping[str, Any]) -> None:
        from mlflow.entities import RunTag

        entities = [RunTag(key, shorten(str(value))) for key, value in tags.items()]
        for start in range(0, len(entities), PARAMS_PER_BATCH):
            self._call(self._client.log_batch, run_id, tags=entities[start : start + PARAMS_PER_BATCH])

    def generation(self, message: Mapping[str, Any]) -> None:
        """A new generation, or more fields (``recovery_seconds`` ...) of the current one."""
        number = int(message["generation"])
        if number not in self._children:
            self._close_child("FINISHED" if message.get("cause") in PLANNED else "KILLED")
            name = f"generation {number}: {layout_text(message.get('layout', ''))}"
            child = self._created(name, {PARENT_TAG: self.run_id, GENERATION_TAG: str(number)})
            if child.info.status != "RUNNING":  # the writer before this one has ended it
                self._call(self._client.update_run, child.info.run_id, "RUNNING")
            self._children[number] = child.info.run_id
            self._current = number
        fields = {
            key: value for key, value in message.items() if key not in ("type", "event", "time") and value is not None
        }
        fields |= {f"{phase}_seconds": value for phase, value in (fields.pop("phases", None) or {}).items()}
        tags = {key: layout_text(value) if key == "layout" else str(value) for key, value in fields.items()}
        self._log_tags(self._children[number], tags)
        seconds = {key: float(value) for key, value in fields.items() if key.endswith("_seconds")}
        points = metrics_of(seconds, int(message.get("step") or 0), message.get("time"))
        if points:
            self._call(self._client.log_batch, self._children[number], metrics=points)
            self._call(self._client.log_batch, self.run_id, metrics=points)
        self._story.generation(dict(fields))
        self._write_story()

    def _close_child(self, status: str) -> None:
        if self._current is not None:
            self._call(self._client.set_terminated, self._children[self._current], status)
            self._current = None

    def steps(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Points of finished steps, in the order in which they finished."""
        nan_steps, parent, child = self._nan_steps, [], []
        for message in messages:
            step, when = int(message["step"]), message.get("time")
            values = {key: float(value) for key, value in message["metrics"].items() if value is not None}
            nan_steps += not all(math.isfinite(value) for value in values.values())
            extra = {"nan_steps": float(nan_steps)} if nan_steps else {}
            if self._current is not None:
                values.setdefault("generation", float(self._current))
            parent += metrics_of({**values, **extra}, step, when)
            child += metrics_of({key: values[key] for key in CHILD_METRICS if key in values}, step, when)
        for start in range(0, len(parent), METRICS_PER_BATCH):
            self._call(self._client.log_batch, self.run_id, metrics=parent[start : start + METRICS_PER_BATCH])
        self._nan_steps = nan_steps
        if self._current is not None:
            for start in range(0, len(child), METRICS_PER_BATCH):
                points = child[start : start + METRICS_PER_BATCH]
                self._call(self._client.log_batch, self._children[self._current], metrics=points)

    def event(self, message: Mapping[str, Any]) -> None:
        """An event of the ledger, for the description; a time account becomes metrics."""
        self._time.add(message)
        if message.get("event") == "time_account":
            self._log_time(message)
            return
        if message.get("event") == "generation_formed":  # it has a row in the table
            return
        self._story.event(dict(message))
        self._write_story()

    def _log_time(self, account: Mapping[str, Any]) -> None:
        values = {f"time/{cause}": float(seconds) for cause, seconds in account["seconds"].items()}
        points = metrics_of({"goodput": float(account["goodput"]), **values}, int(account["step"]), account.get("time"))
        self._call(self._client.log_batch, self.run_id, metrics=points)

    def _write_story(self) -> None:
        self._call(self._client.set_tag, self.run_id, NOTE_TAG, shorten(self._story.text()))

    def artifact(self, message: Mapping[str, Any]) -> None:
        """Upload the file ``path`` under ``name`` (a folder and a file name, or a file name)."""
        path = Path(message["path"])
        if not path.is_file():
            raise Refused(f"{path} is not there")
        folder, _, name = str(message.get("name") or path.name).rpartition("/")
        if name == path.name:
            self._call(self._client.log_artifact, self.run_id, str(path), folder or None)
            return
        with tempfile.TemporaryDirectory() as scratch:  # MLflow names an upload after its file
            renamed = Path(scratch) / name
            renamed.write_bytes(path.read_bytes())
            self._call(self._client.log_artifact, self.run_id, str(renamed), folder or None)

    def finish(self, status: str) -> None:
        """End the runs as FINISHED, FAILED or KILLED; then draw where the time went."""
        self._close_child(status)
        self._call(self._client.set_terminated, self.run_id, status)
        with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(ValueError):  # no host ever came
            plot = plot_time(self._time.lines, Path(scratch) / "time.png", title=self._story.name)
            self._call(self._client.log_artifact, self.run_id, str(plot), "plots")

    def _call(self, function: Any, *arguments: Any, **keywords: Any) -> Any:
        from mlflow.exceptions import MlflowException

        try:
            return function(*arguments, **keywords)
        except MlflowException as error:
            kind = Refused if error.error_code in PERMANENT else Unreachable
            raise kind(one_line(error)) from None
        except Exception as error:  # requests, SQLAlchemy, boto3 and file systems each have their own
            raise Unreachable(one_line(error)) from None

    def ui_command(self) -> str:
        """How to look at the run: an address, or the command that opens the UI."""
        if self._uri.startswith(("http://", "https://")):
            return f"{redact(self._uri).rstrip('/')}/#/experiments/{self.experiment_id}/runs/{self.run_id}"
        return f"mlflow ui --backend-store-uri {redact(self._uri)}"


def metrics_of(values: Mapping[str, float], step: int, when: float | None) -> list[Metric]:
    """MLflow metrics at ``step``; ``when`` is in unix seconds. Infinities are shown as NaN: they break plots."""
    from mlflow.entities import Metric

    stamp = int((time.time() if when is None else when) * 1000)
    return [Metric(key, value if math.isfinite(value) else math.nan, stamp, step) for key, value in values.items()]


def shorten(value: str) -> str:
    """``value``, cut to what MLflow takes with a marker at the end."""
    if len(value) <= VALUE_LIMIT:
        return value
    marker = f" ... [truncated: {len(value)} characters, all of them in config.yaml]"
    return value[: VALUE_LIMIT - len(marker)] + marker


def artifact_folder(uri: str) -> str | None:
    """Where files of a new experiment go: beside an SQLite database; None lets a server decide."""
    if not uri.startswith("sqlite:///"):
        return None
    database = Path(os.path.abspath(unquote(uri.removeprefix("sqlite:///"))))
    return (database.parent / "mlartifacts").as_uri()


def one_line(error: BaseException) -> str:
    """The error's text without line breaks and passwords, at most 300 characters."""
    text = redact(" ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def batches(messages: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Neighbouring ``step`` messages of one generation together, every other message alone, order kept."""
    groups: list[list[Mapping[str, Any]]] = []
    for message in messages:
        last = groups[-1][-1] if groups else None
        if last is not None and last["type"] == message["type"] == "step":
            groups[-1].append(message)
        else:
            groups.append([message])
    return groups
