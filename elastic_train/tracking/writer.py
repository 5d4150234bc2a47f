"""The process that writes to MLflow: ``python -m elastic_train.tracking.writer``.

JSON lines on stdin, from the coordinator:
``job`` (name, params, config_yaml, run_id, tags), ``generation`` (generation, layout, hosts, cause, step, *_seconds),
``step`` (step, metrics, time), ``event`` (event, time, ...), ``artifact`` (path, name), ``finish`` (status).
JSON lines on stdout: ``run`` (run_id, experiment_id, ui_command), ``progress`` (delivered), ``warning`` (message),
``done`` (delivered, lost, finished).

The tracking URI comes in MLFLOW_TRACKING_URI, never on the command line, where every user of the machine could read it.
Reading never waits for the server. The end of stdin without ``finish`` means that the coordinator died: KILLED.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from elastic_train.tracking.outbox import Message, Outbox
from elastic_train.tracking.redact import redact, strip_http_credentials
from elastic_train.tracking.sender import Sender

ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT": "20",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""MLflow's own retries block for minutes; ours keep the order and say what is lost."""
REQUIRED = {"job": ("name",), "generation": ("generation",), "step": ("step", "metrics"), "artifact": ("path",)}
"""Fields without which a message of a type says nothing."""
NICENESS = 5
"""Tracking gives way to training on a busy machine."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until ``finish`` or the end of stdin; then at most ``--deadline-seconds`` more."""
    parser = argparse.ArgumentParser(description="Write a job's messages to MLflow.")
    parser.add_argument("--experiment", default="elastic_train")
    parser.add_argument("--deadline-seconds", type=float, default=30.0, help="for what is left at the end")
    parser.add_argument("--capacity", type=int, default=100_000, help="messages kept while the server is away")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's to handle; it sends `finish`
    signal.signal(signal.SIGTERM, lambda *_: os.close(sys.stdin.fileno()))
    os.nice(NICENESS)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    uri = strip_http_credentials(os.environ.get("MLFLOW_TRACKING_URI", ""), os.environ)
    os.environ["MLFLOW_TRACKING_URI"] = uri
    answer = Answers()
    if not uri:
        answer({"type": "warning", "message": "MLFLOW_TRACKING_URI is not set; nothing is tracked"})
    outbox = Outbox(options.capacity)
    sender = Sender(uri, options.experiment, outbox, answer)
    threading.Thread(target=sender.run, name="sender", daemon=True).start()
    read_messages(outbox, answer)
    sender.hurry(options.deadline_seconds)
    finished = sender.ended.wait(options.deadline_seconds)
    answer({"type": "done", **sender.totals(), "finished": finished})
    # The sender may sit in a request that nothing interrupts, and MLflow's threads must not hold the exit up.
    sys.stdout.flush()
    os._exit(0)


class Answers:
    """Writes JSON lines to stdout, one at a time, without passwords."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self, message: Message) -> None:
        # When nobody listens any more, the runs are still to be closed.
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):
            print(redact(json.dumps(message)), flush=True)


def read_messages(outbox: Outbox, answer: Callable[[dict[str, Any]], None]) -> None:
    """Feed ``outbox`` from stdin until ``finish`` or its end; a line that is no message is told and left out."""
    try:
        for line in sys.stdin:
            try:
                message = json.loads(line)
                kind = message["type"]
                absent = [field for field in REQUIRED.get(kind, ()) if field not in message]
            except (ValueError, TypeError, KeyError):
                answer({"type": "warning", "message": f"not a message: {line.strip()[:80]!r}"})
                continue
            if absent:
                answer({"type": "warning", "message": f"a {kind} message without {', '.join(absent)}"})
                continue
            outbox.put(message)
            if kind == "finish":
                return
    except (OSError, ValueError):  # SIGTERM closed stdin
        pass
    outbox.put({"type": "finish", "status": "KILLED"})


if __name__ == "__main__":
    sys.exit(main())
