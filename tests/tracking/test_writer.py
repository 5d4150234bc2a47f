"""The writer process against SQLite and a real server, driven through ``Tracker`` as the coordinator does."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_train.config.job import Job
from elastic_train.config.operation import TrackingConfig
from elastic_train.controller.job_folder import JobFolder
from elastic_train.controller.tracker import Tracker, TrackingResult, tracking_uri
from elastic_train.controller.tracking_feed import TrackingFeed
from tests.cli.command import ROOT
from tests.jobs import make_job
from tests.tracking.messages import METRICS, Recorded, generation_message, job_message, step_message
from tests.tracking.mlflow_server import MlflowServer


def track(uri: str, experiment: str, messages: list[dict[str, Any]], status: Any = "FINISHED") -> TrackingResult:
    tracker = Tracker(uri, experiment, deadline_seconds=120)
    for message in messages:
        tracker.send(message)
    return tracker.close(status)


class Answers:
    """What the writer says, with a way to wait for it."""

    def __init__(self) -> None:
        self._all: list[dict[str, Any]] = []
        self._new = threading.Condition()

    def __call__(self, answer: dict[str, Any]) -> None:
        with self._new:
            self._all.append(answer)
            self._new.notify_all()

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool], seconds: float = 120) -> dict[str, Any]:
        with self._new:
            assert self._new.wait_for(lambda: any(map(wanted, self._all)), seconds), self._all
            return next(answer for answer in self._all if wanted(answer))


def warns(word: str) -> Callable[[dict[str, Any]], bool]:
    return lambda answer: answer["type"] == "warning" and word in answer["message"]


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once: MLflow's dozens of migrations take seconds."""
    path = tmp_path_factory.mktemp("database") / "mlflow.db"
    track(f"sqlite:///{path}", "first", [job_message()])
    return path


@pytest.fixture
def database(tmp_path: Path, empty_database: Path) -> str:
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


def test_one_parent_run_and_a_child_per_generation(database: str) -> None:
    """ML-01: one run, five points per metric, whatever the number of ranks."""
    messages = [job_message(tags={"job_folder": "runs/job"}), generation_message(1)]
    messages += [step_message(step) for step in (1, 2, 3)]
    messages += [{"type": "event", "event": "host_lost", "host": 3, "time": 1_700_000_003.5}]
    messages += [
        generation_message(2, "host_lost", layout="pp2", hosts=2, step=3, recovery_seconds=2.5, phases={"build": 0.5})
    ]
    messages += [step_message(step) for step in (4, 5)]
    result = track(database, "one", messages)
    assert (result.delivered, result.lost, result.warnings) == (5, 0, [])

    recorded = Recorded(database, "one")
    assert recorded.parent.info.run_id == result.run_id
    assert recorded.parent.info.status == "FINISHED"
    for metric in METRICS:
        assert len(recorded.history(metric)) == 5
    assert recorded.history("loss") == [(step, 5.0 / step) for step in range(1, 6)]
    assert recorded.history("generation") == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]
    assert recorded.history("recovery_seconds") == [(3, 2.5)]
    assert recorded.history("build_seconds", recorded.children[1]) == [(3, 0.5)]
    first, second = recorded.children
    assert recorded.history("loss", first) == [(1, 5.0), (2, 2.5), (3, 5.0 / 3)]
    assert recorded.history("loss", second) == [(4, 1.25), (5, 1.0)]
    assert (first.info.run_name, first.info.status) == ("generation 1: pp2 x dp_shard2", "KILLED")
    assert (second.data.tags["cause"], second.info.status) == ("host_lost", "FINISHED")
    note = recorded.parent.data.tags["mlflow.note.content"]
    assert "| 2 | 3 | pp2 | 2 | host_lost | 2.50 |" in note
    assert "**host lost** host 3" in note


def test_nothing_is_written_outside_the_folder_of_the_database(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ML-07: no mlruns folder in the working directory of whoever writes."""
    here = tmp_path / "cwd"
    here.mkdir()
    monkeypatch.chdir(here)
    track(database, "where", [job_message()])
    assert list(here.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cwd", "mlartifacts", "mlflow.db"]


def test_long_values_and_many_parameters(database: str) -> None:
    """ML-06: 7,000 characters, 300 parameters; the configuration is complete as a file."""
    params = {f"section.p{number}": number for number in range(299)} | {"note": "x" * 7000}
    text = "note: " + "x" * 7000 + "\n"
    result = track(database, "long", [job_message(params=params, config_yaml=text), step_message(1)])
    assert (result.delivered, result.warnings) == (1, [])
    recorded = Recorded(database, "long")
    shown = recorded.parent.data.params
    assert len(shown) == 300
    assert len(shown["note"]) == 6000
    assert shown["note"].endswith("[truncated: 7000 characters, all of them in config.yaml]")
    path = recorded.client.download_artifacts(recorded.parent.info.run_id, "config.yaml")
    assert Path(path).read_text() == text


def test_nan_stays_visible(database: str) -> None:
    """ML-09: the point is stored as NaN and counted; an infinity does not become a huge number."""
    messages = [job_message(), step_message(1), step_message(2), step_message(3, math.nan), step_message(4)]
    result = track(database, "nan", [*messages, step_message(5, math.inf)])
    assert (result.delivered, result.lost) == (5, 0)
    recorded = Recorded(database, "nan")
    losses = dict(recorded.history("loss"))
    assert [step for step, loss in losses.items() if math.isnan(loss)] == [3, 5]
    assert recorded.history("nan_steps") == [(3, 1.0), (4, 1.0), (5, 2.0)]


def test_a_resubmission_continues_the_run(database: str) -> None:
    first = track(database, "again", [job_message(params={"a": 1, "b": 2}), step_message(1, math.nan)], "KILLED")
    assert Recorded(database, "again").parent.info.status == "KILLED"
    params = {"a": 1, "b": 3, "c": 4}
    second = track(
        database, "again", [job_message(params=params, run_id=first.run_id), step_message(2, math.nan), step_message(3)]
    )
    assert second.run_id == first.run_id
    recorded = Recorded(database, "again")
    assert recorded.parent.info.status == "FINISHED"
    assert recorded.parent.data.params == {"a": "1", "b": "2", "c": "4"}
    assert recorded.parent.data.tags["changed.b"] == "3"
    assert [step for step, _ in recorded.history("loss")] == [1, 2, 3]
    assert recorded.history("nan_steps")[-1] == (3, 2.0)


@pytest.mark.slow
def test_a_coordinator_that_comes_back_continues_the_run_of_the_generation_it_adopts(
    database: str, tmp_path: Path
) -> None:
    uri = f"tracking.uri='{database}'"
    job = make_job(tmp_path / "no data", tmp_path, "adopted", "tracking.enabled=true", uri, "tracking.experiment=back")
    about = {"generation": 3, "layout": "dp_shard2", "hosts": 2, "cause": "host_lost", "time": 1_700_000_000.0}
    formed = about | {"event": "generation_formed", "step": 4, "recovery_seconds": 2.5, "reason": "why"}
    adopted = about | {"event": "generation_adopted", "start_step": 4, "step": 7, "steps": 2}
    asyncio.run(feed(job, [formed, step_event(5)], "killed"))
    asyncio.run(feed(job, [adopted, step_event(6), step_event(7)], "finished"))
    recorded = Recorded(database, "back")
    (child,) = recorded.children
    assert (child.info.run_name, child.info.status) == ("generation 3: dp_shard2", "FINISHED")
    assert recorded.history("loss", child) == [(5, 3.0), (6, 3.0), (7, 3.0)]
    assert {key: child.data.tags[key] for key in ("cause", "step", "reason")} == {
        "cause": "host_lost",
        "step": "4",
        "reason": "why",
    }
    note = recorded.parent.data.tags["mlflow.note.content"]
    assert "| 3 | 4 | dp_shard2 | 2 | host_lost |" in note and "**generation adopted**" in note


def step_event(step: int) -> dict[str, Any]:
    line = {"event": "step", "step": step, "loss": 3.0, "grad_norm": 1.0, "lr": 1e-3, "valid_tokens": 256}
    line |= {"seconds": 1.0, "snapshot_seconds": 0.0, "stall_seconds": 0.0, "data_seconds": 0.0}
    return line | {"generation": 3, "time": 1_700_000_000.0 + step}


async def feed(job: Job, events: list[dict[str, Any]], state: str) -> None:
    """What one coordinator tells."""
    folder = JobFolder(job)
    folder.open("digest")
    tracking = TrackingFeed(job)
    tracking.start(folder)
    for event in events:
        tracking.on_event(event)
    await tracking.close(state)
    folder.close()


def test_a_run_that_is_gone_is_replaced(database: str) -> None:
    result = track(database, "gone", [job_message(run_id="0" * 32), step_message(1)])
    assert (result.delivered, result.warnings) == (1, [])
    assert Recorded(database, "gone").parent.info.run_id == result.run_id != "0" * 32


def test_repeated_steps_after_a_roll_back(database: str) -> None:
    messages = [job_message(), generation_message(1), step_message(1), step_message(2, 9.0)]
    messages += [generation_message(2, "host_lost", step=1), step_message(2, 9.0), step_message(3)]
    track(database, "back", messages)
    recorded = Recorded(database, "back")
    assert sorted(set(recorded.history("generation"))) == [(1, 1), (2, 1), (2, 2), (3, 2)]
    assert [step for step, _ in recorded.history("loss", recorded.children[1])] == [2, 3]


def test_files(database: str, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    plot.write_bytes(b"png")
    messages = [job_message(), {"type": "artifact", "path": str(plot), "name": "plots/loss.png"}]
    messages += [{"type": "artifact", "path": str(tmp_path / "absent"), "name": "absent"}]
    result = track(database, "files", messages)
    assert any("absent is not there" in warning for warning in result.warnings)
    recorded = Recorded(database, "files")
    path = recorded.client.download_artifacts(recorded.parent.info.run_id, "plots/loss.png")
    assert Path(path).read_bytes() == b"png"


def test_where_the_time_went(database: str) -> None:
    messages = [
        job_message(),
        {"type": "event", "event": "job_started", "time": 1_700_000_000.0},
        generation_message(1),
    ]
    for at, useful in ((10.0, 15.0), (20.0, 35.0)):
        account = {"goodput": useful / (2 * at), "seconds": {"useful": useful, "start": 5.0}, "step": int(at)}
        messages.append({"type": "event", "event": "time_account", "time": 1_700_000_000.0 + at, **account})
    assert track(database, "time", messages).warnings == []
    recorded = Recorded(database, "time")
    assert recorded.history("goodput") == [(10, 0.75), (20, 0.875)]
    assert recorded.history("time/useful") == [(10, 15.0), (20, 35.0)]
    assert recorded.history("time/start") == [(10, 5.0), (20, 5.0)]
    assert "time account" not in recorded.parent.data.tags["mlflow.note.content"]
    path = recorded.client.download_artifacts(recorded.parent.info.run_id, "plots/time.png")
    assert Path(path).read_bytes().startswith(b"\x89PNG")
    assert recorded.parent.info.status == "FINISHED"


def test_bad_messages_are_told_and_do_no_harm(database: str) -> None:
    messages = [step_message(1), job_message(), {"type": "dance"}, {"type": "step", "step": 1}, step_message(2)]
    result = track(database, "bad", messages)
    assert (result.delivered, result.lost) == (1, 2)
    for words in ("has to come first", "unknown message type 'dance'", "a step message without metrics"):
        assert any(words in warning for warning in result.warnings), words


def test_the_death_of_the_coordinator_closes_the_run_as_killed(database: str) -> None:
    """The end of stdin without ``finish``."""
    text = "".join(json.dumps(message) + "\n" for message in (job_message(), step_message(1)))
    environment = {**os.environ, "MLFLOW_TRACKING_URI": database, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "elastic_train.tracking.writer"]
    command += ["--experiment", "orphan", "--deadline-seconds", "120"]
    result = subprocess.run(command, input=text, env=environment, capture_output=True, text=True)
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert answers[-1] == {"type": "done", "delivered": 1, "lost": 0, "finished": True}
    assert Recorded(database, "orphan").parent.info.status == "KILLED"


def test_sigterm_closes_the_run_as_killed(database: str) -> None:
    answers = Answers()
    tracker = Tracker(database, "terminated", on_answer=answers, deadline_seconds=120)
    tracker.send(job_message())
    answers.wait_for(lambda answer: answer["type"] == "run")
    os.kill(tracker.pid, signal.SIGTERM)
    answers.wait_for(lambda answer: answer["type"] == "done")
    tracker.close("KILLED")
    assert Recorded(database, "terminated").parent.info.status == "KILLED"


def test_a_writer_that_dies_is_told_and_send_goes_on(database: str) -> None:
    answers = Answers()
    tracker = Tracker(database, "dead", on_answer=answers)
    tracker.send(job_message())
    answers.wait_for(lambda answer: answer["type"] == "run")
    os.kill(tracker.pid, signal.SIGKILL)
    for step in range(1, 21):
        tracker.send(step_message(step))
    answers.wait_for(warns("ended early"))
    result = tracker.close("FINISHED")
    assert (result.delivered, result.lost) == (0, 20)


def test_send_never_blocks_when_the_writer_does_not_read(database: str) -> None:
    """A stopped writer: 12,000 messages fill its pipe and our queue; the rest is dropped and counted."""
    tracker = Tracker(database, "stopped", deadline_seconds=0.5)
    os.kill(tracker.pid, signal.SIGSTOP)
    for step in range(1, 12_001):
        tracker.send(step_message(step))  # would wait for ever
    result = tracker.close("FINISHED")
    assert (result.delivered, result.lost) == (0, 12_000)


def test_passwords_are_never_shown(tmp_path: Path) -> None:
    log = tmp_path / "log"
    answers = Answers()
    uri = "http://user:s3cr%40t@127.0.0.1:9/path"
    tracker = Tracker(uri, "secret", log=log, on_answer=answers, deadline_seconds=1)
    tracker.send(job_message())
    tracker.send(step_message(1))
    answers.wait_for(warns("does not answer"))
    command_line = Path(f"/proc/{tracker.pid}/cmdline").read_bytes()
    result = tracker.close("FINISHED")
    assert (result.delivered, result.lost) == (0, 1)
    everything = f"{result} {log.read_text()} {command_line!r}"
    assert "s3cr" not in everything
    assert "user:" not in everything


def test_where_a_job_is_tracked(tmp_path: Path) -> None:
    local = str(tmp_path / "runs")
    default = f"sqlite:///{local}/mlflow.db"
    assert tracking_uri(TrackingConfig(), local, {}) == default
    assert tracking_uri(TrackingConfig(), f"file://{local}", {}) == default
    assert tracking_uri(TrackingConfig(), local, {"MLFLOW_TRACKING_URI": "http://there"}) == "http://there"
    assert (
        tracking_uri(TrackingConfig(uri="http://here"), local, {"MLFLOW_TRACKING_URI": "http://there"}) == "http://here"
    )
    assert tracking_uri(TrackingConfig(enabled=False), local, {"MLFLOW_TRACKING_URI": "http://there"}) is None
    assert tracking_uri(TrackingConfig(), "s3://bucket/runs", {}) is None


def test_a_server(mlflow_server: MlflowServer) -> None:
    params = {f"p{number}": number for number in range(300)} | {"note": "x" * 7000}
    messages = [job_message(params=params, config_yaml="whole: yes\n"), generation_message(1)]
    messages += [step_message(step, math.nan if step == 3 else None) for step in range(1, 6)]
    result = track(mlflow_server.uri, "server", messages)
    assert (result.delivered, result.lost, result.warnings) == (5, 0, [])
    recorded = Recorded(mlflow_server.uri, "server")
    assert result.ui_command == (
        f"{mlflow_server.uri}/#/experiments/{recorded.parent.info.experiment_id}/runs/{result.run_id}"
    )
    assert len(recorded.history("loss")) == 5
    assert recorded.history("nan_steps") == [(3, 1.0), (4, 1.0), (5, 1.0)]
    assert len(recorded.parent.data.params) == 301
    path = recorded.client.download_artifacts(recorded.parent.info.run_id, "config.yaml")
    assert Path(path).read_text() == "whole: yes\n"


@pytest.mark.slow
@pytest.mark.parametrize("outage", ["freeze", "kill"])
def test_an_outage_in_the_middle_is_made_up_for(mlflow_server: MlflowServer, outage: str) -> None:
    """ML-03: nothing waits for the server; what was kept arrives when it is back, every point once."""
    answers = Answers()
    tracker = Tracker(mlflow_server.uri, f"outage-{outage}", on_answer=answers, deadline_seconds=120)
    tracker.send(job_message())
    tracker.send(generation_message(1))
    tracker.send(step_message(1))
    answers.wait_for(lambda answer: answer["type"] == "run")
    getattr(mlflow_server, outage)()
    try:
        for step in range(2, 1001):
            tracker.send(step_message(step))
        answers.wait_for(warns("does not answer"))
    finally:
        mlflow_server.thaw() if outage == "freeze" else mlflow_server.start()
    result = tracker.close("FINISHED")
    assert (result.delivered, result.lost) == (1000, 0)
    recorded = Recorded(mlflow_server.uri, f"outage-{outage}")
    with sqlite3.connect(f"file:{mlflow_server.folder / 'server.db'}?mode=ro", uri=True) as store:
        query = "select step, value from metrics where run_uuid = ? and key = 'loss' order by step"
        curve = store.execute(query, (recorded.parent.info.run_id,)).fetchall()
    assert curve == [(step, 5.0 / step) for step in range(1, 1001)]
    assert recorded.parent.info.status == "FINISHED"


@pytest.mark.slow
def test_a_server_that_stays_away_costs_points_and_says_so(mlflow_server: MlflowServer) -> None:
    """ML-03: down at the start and frozen to the end: the loss is stated and the end is not held up."""
    down = track_with_deadline("http://127.0.0.1:9", "down")
    assert (down.delivered, down.lost) == (0, 50)
    mlflow_server.freeze()
    try:
        frozen = track_with_deadline(mlflow_server.uri, "frozen")
    finally:
        mlflow_server.thaw()
    assert (frozen.delivered, frozen.lost) == (0, 50)


def track_with_deadline(uri: str, experiment: str) -> TrackingResult:
    tracker = Tracker(uri, experiment, deadline_seconds=4)
    for message in [job_message(), *(step_message(step) for step in range(1, 51))]:
        tracker.send(message)
    return tracker.close("FINISHED")
