"""The coordinator's end of tracking: a writer process of its own, and a pipe to it that never blocks a step."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import elastic_train
from elastic_train.config.operation import TrackingConfig

WRITER_MODULE = "elastic_train.tracking.writer"
QUEUE_MESSAGES = 10_000
"""Messages kept while the writer process is slow to read; more are dropped and counted."""


@dataclass(slots=True)
class TrackingResult:
    """What became of a job's points."""

    run_id: str | None = None
    ui_command: str | None = None
    delivered: int = 0
    lost: int = 0
    warnings: list[str] = field(default_factory=list)


def tracking_uri(config: TrackingConfig, storage_uri: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The URI that everyone of this job uses, resolved once, by the driver.

    The job file's, else MLFLOW_TRACKING_URI, else an SQLite file beside the job folders where they are local. None:
    tracking is off, or there is no such place (job folders in object storage and no URI given).
    """
    if not config.enabled:
        return None
    given = config.uri or environment.get("MLFLOW_TRACKING_URI")
    if given:
        return given
    if "://" in storage_uri and not storage_uri.startswith("file://"):
        return None
    folder = Path(storage_uri.removeprefix("file://")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'mlflow.db'}"


class Tracker:
    """Starts the writer; ``send`` is safe from any thread and returns at once, whatever the writer does."""

    def __init__(
        self,
        uri: str,
        experiment: str,
        *,
        log: Path | None = None,
        on_answer: Callable[[dict[str, Any]], None] | None = None,
        deadline_seconds: float = 30.0,
    ) -> None:
        """``log`` takes the writer's stderr; ``on_answer`` sees its ``run`` and ``warning`` lines (from a thread)."""
        self._on_answer = on_answer
        self._deadline = deadline_seconds
        self._queue: queue.Queue[str | None] = queue.Queue(QUEUE_MESSAGES)
        self._steps = 0
        self._done = False
        self._closing = threading.Event()
        self.result = TrackingResult()
        self._process = _start(uri, experiment, log, deadline_seconds)
        self._sender = threading.Thread(target=self._write, name="tracker-write", daemon=True)
        self._reader = threading.Thread(target=self._read, name="tracker-read", daemon=True)
        self._sender.start()
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id of the writer."""
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue one message (see ``elastic_train.tracking.writer``). A full queue drops it; a step is then lost."""
        self._steps += message.get("type") == "step"
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(json.dumps(message))

    def close(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> TrackingResult:
        """End the run as ``status`` and wait for the writer, at most the deadline (and the time to end it) long."""
        if not self._closing.is_set():
            self._closing.set()
            end = time.monotonic() + self._deadline + 2
            try:
                self._queue.put(json.dumps({"type": "finish", "status": status}), timeout=1)
                self._queue.put(None, timeout=1)
            except queue.Full:
                self._warn("the tracking process does not read; it is ended")
                end = time.monotonic()
            self._await_exit(max(end - time.monotonic(), 0.0))
            # Whatever became of them on the way: full queue, full pipe, dead writer, refused, out of time.
            self.result.lost = self._steps - self.result.delivered
        return self.result

    def _await_exit(self, seconds: float) -> None:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(2)
        self._sender.join(2)

    def _write(self) -> None:
        pipe: IO[str] = self._process.stdin  # type: ignore[assignment]
        try:
            while (line := self._queue.get()) is not None:
                pipe.write(line + "\n")
                pipe.flush()
        except (BrokenPipeError, ValueError):
            pass  # the reading thread sees the end, too, and says so
        finally:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _read(self) -> None:
        pipe: IO[str] = self._process.stdout  # type: ignore[assignment]
        for line in pipe:
            try:
                answer = json.loads(line)
            except ValueError:  # a library printed something
                continue
            self._take(answer)
        if not self._done:
            self._warn("the tracking process has ended early; points that it had not delivered are lost")

    def _take(self, answer: dict[str, Any]) -> None:
        kind = answer.get("type")
        if kind == "run":
            self.result.run_id, self.result.ui_command = answer["run_id"], answer["ui_command"]
        elif kind == "warning":
            self.result.warnings.append(answer["message"])
        elif kind == "progress":
            self.result.delivered = answer["delivered"]
        elif kind == "done":
            self.result.delivered, self._done = answer["delivered"], True
        if self._on_answer is not None:
            self._on_answer(answer)

    def _warn(self, text: str) -> None:
        self._take({"type": "warning", "message": text})


def _start(uri: str, experiment: str, log: Path | None, deadline: float) -> subprocess.Popen[str]:
    package_root = str(Path(elastic_train.__file__).parents[1])
    path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
    # The URI may hold a password: the environment is private to the user, the command line is not.
    environment = {**os.environ, "PYTHONPATH": path, "MLFLOW_TRACKING_URI": uri, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", WRITER_MODULE, "--experiment", experiment, "--deadline-seconds", str(deadline)]
    stderr = log.open("ab") if log is not None else None
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            text=True,
            start_new_session=True,  # Ctrl-C in the terminal must not end it before the coordinator has said `finish`
        )
    finally:
        if stderr is not None:
            stderr.close()
