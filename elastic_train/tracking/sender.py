"""The thread that talks to MLflow: in order, in batches, again and again while the server is away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic_train.tracking.mlflow_store import Refused, RunStore, Unreachable, batches, one_line
from elastic_train.tracking.outbox import Message, Outbox

BATCH = 200
"""Messages per round; a step has about six metrics and MLflow takes 1,000 at a time."""
ROUND_SECONDS = 1.0
"""Points are collected this long, so that a fast job makes one request per second and not one per step."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0


class Sender:
    """Moves messages from the outbox to a RunStore until ``finish`` has been delivered or refused."""

    def __init__(self, uri: str, experiment: str, outbox: Outbox, answer: Callable[[Message], None]) -> None:
        self._uri, self._experiment = uri, experiment
        self._outbox, self._answer = outbox, answer
        self._store: RunStore | None = None
        self._delivered = self._refused = 0
        self._disabled = not uri
        self._hurry = threading.Event()
        self.ended = threading.Event()

    def hurry(self, seconds: float) -> None:
        """The end is near: no more collecting, pauses of at most a tenth of ``seconds``."""
        self._longest_pause = max(seconds / 10, 0.1)
        self._hurry.set()

    def totals(self) -> dict[str, int]:
        """Steps that reached the server and steps that did not."""
        lost = self._refused + self._outbox.dropped_steps + self._outbox.waiting_steps()
        return {"delivered": self._delivered, "lost": lost}

    def run(self) -> None:
        """Body of the thread."""
        try:
            while not self.ended.is_set():
                messages = self._outbox.take(BATCH)
                for group in batches(messages):
                    self._deliver(group)
                    self._outbox.done(len(group))
                    if group[0]["type"] == "finish":
                        self.ended.set()
                self._hurry.wait(ROUND_SECONDS)
        except Exception as error:  # a defect here must not be silent: the job goes on without tracking
            self._warn(f"tracking stopped: {type(error).__name__}: {one_line(error)}")
        finally:
            self.ended.set()

    def _deliver(self, group: Sequence[Mapping[str, Any]]) -> None:
        """Deliver one group, however long the server is away; a refusal is told and counted."""
        pause, away_since = FIRST_PAUSE, 0.0
        while True:
            try:
                if not self._disabled:
                    self._send(group)
                break
            except Refused as error:
                self._refuse(group, str(error))
                return
            except (KeyError, TypeError, ValueError) as error:
                self._refuse(group, f"a field is missing or malformed: {error!r}")
                return
            except Unreachable as error:
                if not away_since:
                    away_since = time.monotonic()
                    self._warn(f"the MLflow server does not answer, points are kept until it does: {error}")
                self._pause(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        if away_since:
            self._warn(f"the MLflow server answers again after {time.monotonic() - away_since:.0f} s")
        steps = sum(message["type"] == "step" for message in group)
        if self._disabled:
            self._refused += steps
        elif steps:
            self._delivered += steps
            self._answer({"type": "progress", "delivered": self._delivered})

    def _pause(self, seconds: float) -> None:
        if self._hurry.is_set():
            time.sleep(min(seconds, self._longest_pause))
        else:
            self._hurry.wait(seconds)

    def _send(self, group: Sequence[Mapping[str, Any]]) -> None:
        kind = group[0]["type"]
        if self._store is None:
            self._store = RunStore(self._uri, self._experiment)
        store = self._store
        if kind != "job" and not store.run_id:
            raise Refused("the job message has to come first")
        if kind == "job":
            store.open(group[0])
            run = {"run_id": store.run_id, "experiment_id": store.experiment_id, "ui_command": store.ui_command()}
            self._answer({"type": "run", **run})
        elif kind == "step":
            store.steps(group)
        elif kind == "generation":
            store.generation(group[0])
        elif kind == "event":
            store.event(group[0])
        elif kind == "artifact":
            store.artifact(group[0])
        elif kind == "finish":
            store.finish(str(group[0].get("status", "FINISHED")))
        else:
            raise Refused(f"unknown message type {kind!r}")

    def _refuse(self, group: Sequence[Mapping[str, Any]], reason: str) -> None:
        kind = group[0]["type"]
        self._refused += sum(message["type"] == "step" for message in group)
        if kind == "job":
            self._disabled = True
            self._warn(f"the MLflow server refuses the run, nothing is tracked: {reason}")
        else:
            self._warn(f"the MLflow server takes no {kind} message: {reason}")

    def _warn(self, text: str) -> None:
        self._answer({"type": "warning", "message": text})
