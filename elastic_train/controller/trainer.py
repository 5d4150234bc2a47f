"""The trainer process: computes for one generation, is never repaired and may be killed at any moment.

Forked by the host's forkserver with one socket to the host. The host's first line is the assignment; everything the
trainer has to tell goes back as lines: ``phase``, ``described``, ``stepped``, ``completed`` or ``error``. To
``described`` the answer is ``directions``, when there is something in memory to restore.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from elastic_train.checkpoint.capture import Capture, describe
from elastic_train.checkpoint.errors import DamagedChunk, NoRoom, SourceError
from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.controller.agreement import Agreement, barrier_of_all_ranks
from elastic_train.controller.control_block import ControlBlock
from elastic_train.controller.process_control import name_process, own_time, prefer_to_be_killed
from elastic_train.controller.restoring import DamagedManifest, Restoration, Unreadable
from elastic_train.controller.snapshots import Snapshots
from elastic_train.controller.wire import Message, decode, encode
from elastic_train.data.evaluation import open_evaluation
from elastic_train.data.sources import open_training
from elastic_train.model.hf_folder import open_source
from elastic_train.storage import outage
from elastic_train.storage.errors import NotFound, StorageError, WrongSettings
from elastic_train.storage.store import Store
from elastic_train.training.engine import Engine
from elastic_train.training.state_keys import state_keys
from elastic_train.training.step_judge import History, StepJudge

_GROUP_TIMEOUT = timedelta(minutes=30)
"""Only a last resort: the coordinator kills a generation long before its collectives time out."""


class BadStep(RuntimeError):
    """Loss or gradient norm is not finite, or a spike, and the step is not to be left out. No weight has changed."""


class Trainer:
    """One rank of one generation, as told by ``assignment``."""

    def __init__(self, channel: socket.socket, lines: BinaryIO, assignment: Message) -> None:
        self._channel, self._lines = channel, lines
        self._job = Job.model_validate(assignment["job"], strict=False)
        self._generation: int = assignment["generation"]
        self._rank: int = assignment["rank"]
        self._layout = Layout(**assignment["layout"])
        self._assignment = assignment
        self._control = ControlBlock(assignment["control"])
        self._pool = Path(assignment["pool"])
        open_store = partial(Store.open, assignment["job_folder"], self._job.storage)
        self._restoration = Restoration(
            assignment["restore"], self._pool, assignment["token"], open_store, self._control.beat
        )
        self._snapshots: Snapshots | None = None
        failure = self._job.failure
        self._judge = StepJudge(
            failure.bad_step_window,
            failure.loss_spike_factor,
            failure.norm_spike_factor,
            History(**assignment["history"]),
        )
        self._no_retry: set[int] = set(assignment["no_retry"])
        """steps that are left out when they are bad, also under ``roll_back``"""
        self._stalled = 0.0
        """how long the update of the step had to wait for the snapshot of the one before"""
        self._telling = threading.Lock()
        self.step: int = assignment["start_step"]

    def tell(self, message: Message) -> None:
        """Send a line to the host, from any thread."""
        with self._telling:
            self._channel.sendall(encode(message))

    def _hear(self, kind: str) -> Message:
        """The host's next line, which must be of that kind."""
        line = self._lines.readline()
        if not line:
            raise BrokenPipeError("the host has ended")
        message = decode(line)
        assert message["type"] == kind
        return message

    def run(self) -> None:
        """Form the group, take the state, then step until the job's last step."""
        started = time.time()
        self._join_group()
        self._phase("group", started)
        started = time.time()
        engine = self._build_engine()
        self.tell({"type": "described", "description": describe(engine.state()).to_json()})
        self._phase("build", started)
        started = time.time()
        self._take_state(engine)
        self._phase("restore", started)
        snapshots = self._snapshots = self._open_snapshots(engine)
        engine.before_update, engine.judge = self._before_update, self._judge_step
        for step in range(self.step + 1, self._job.training.steps + 1):
            self._run_step(engine, snapshots, step)
        snapshots.wait()
        self.tell({"type": "completed", "step": self.step})

    def _phase(self, name: str, started: float) -> None:
        self.tell({"type": "phase", "name": name, "seconds": time.time() - started})

    def _join_group(self) -> None:
        address, port = self._assignment["store"]
        store = PrefixStore(f"generation-{self._generation}", TCPStore(address, port, is_master=False))
        backend = "gloo" if self._job.hosts.device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend, store=store, rank=self._rank, world_size=self._layout.world_size, timeout=_GROUP_TIMEOUT
        )
        self._agreement = Agreement(self._control, barrier_of_all_ranks())

    def _build_engine(self) -> Engine:
        data = open_training(self._job, self._control.beat)
        evaluation = open_evaluation(self._job, data.datasets[0].manifest, self._control.beat)
        engine = Engine(self._job, self._layout, self._rank, data.batches, evaluation)
        engine.on_progress = self._control.beat
        return engine

    def _take_state(self, engine: Engine) -> None:
        """Fresh weights (random, or of ``init_from``), or the state that the assignment names."""
        if self._restoration.fresh:
            engine.initialize(open_source(self._job))
            return
        ranks = self._hear("directions")["ranks"] if self._restoration.from_memory else []
        restored = self._restoration.run(engine.state(), self._rank, state_keys(self._job), ranks)
        engine.publish()
        self.tell({"type": "restored", "bytes": dict(restored.bytes_read), "passed_over": restored.passed_over})

    def _open_snapshots(self, engine: Engine) -> Snapshots:
        capture = Capture(engine.state(), engine.frozen)
        keep = self._restoration.images
        place = self._pool, self._generation, self._rank
        return Snapshots(capture, self._control, self._agreement.wait, self.tell, *place, keep)

    def _run_step(self, engine: Engine, snapshots: Snapshots, step: int) -> None:
        self._control.start(step)
        started, cpu_started, own_started = time.time(), time.process_time(), own_time()
        metrics = engine.train_step(step)
        passed = time.time() - started
        own, cpu_wait = (after - before for after, before in zip(own_time(), own_started, strict=True))
        self.step = step
        message = {
            "type": "stepped",
            "step": step,
            "loss": _finite_or_none(metrics.loss),
            "grad_norm": _finite_or_none(metrics.grad_norm),
            "lr": metrics.lr,
            "valid_tokens": metrics.valid_tokens,
            **{name: _finite_or_none(loss) for name, loss in metrics.evaluation().items()},
            "eval_seconds": engine.evaluation_seconds,
            "seconds": passed - engine.evaluation_seconds - self._stalled,
            "cpu_seconds": time.process_time() - cpu_started,
            "own_seconds": own,
            "cpu_wait_seconds": cpu_wait,
            "stall_seconds": self._stalled,
            "data_seconds": engine.data_seconds,
            "slots": [engine.slots.start, engine.slots.stop],
            "batch": engine.batch_digest,
        }
        if metrics.skipped is not None:
            message["skipped"] = metrics.skipped
        snapshots.begin(step, message)

    def _judge_step(self, step: int, loss: float, norm: float) -> str | None:
        """Why ``step`` is left out; None if it is good. Raises BadStep if it must not be left out."""
        bad = self._judge.judge(loss, norm)
        if bad is not None:
            policy = self._job.failure.bad_step
            if policy == "end" or (policy == "roll_back" and step not in self._no_retry):
                raise BadStep(f"step {step}: {bad}; no weight was changed")
            self._no_retry.add(step + 1)  # not a fault that passes: the next one costs no re-forming
        return bad

    def _before_update(self) -> None:
        """The snapshot of the step before must be whole before this step changes the state."""
        assert self._snapshots is not None
        started = time.time()
        self._snapshots.wait()
        self._stalled = time.time() - started

    def settle(self) -> None:
        """Let the snapshot that is under way become whole; whatever keeps it from that, we are ending anyway."""
        if self._snapshots is not None:
            with contextlib.suppress(Exception):
                self._snapshots.wait()


def _finite_or_none(value: float) -> float | None:
    """As JSON knows no other numbers."""
    return value if math.isfinite(value) else None


def _error_kind(error: BaseException) -> str:
    """What the error means to the coordinator.

    ``peer``: the echo of somebody else's end. ``damaged``: a bad checkpoint. ``unreadable``: a copy in memory that
    cannot be read. ``storage``: storage does not answer. ``no_room``: no memory for snapshots. ``bad_step``: a loss
    that is not finite, or a spike. ``exception``: the rest.
    """
    if isinstance(error, BadStep):
        return "bad_step"
    if isinstance(error, Unreadable):
        return "unreadable"
    if isinstance(error, (DamagedChunk, DamagedManifest)):
        return "damaged"
    if isinstance(error, NoRoom):
        return "no_room"
    cause = error.__cause__ if isinstance(error, SourceError) else error
    if isinstance(cause, StorageError) and not isinstance(cause, (NotFound, WrongSettings)):
        return "storage"
    return "peer" if _lost_peer(error) else "exception"


def _lost_peer(error: BaseException | None) -> bool:
    """A collective failed; a pipeline wraps what its stages raise."""
    if error is None:
        return False
    lost = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
    return lost or _lost_peer(error.__cause__)


def _error_message(error: Exception, step: int) -> Message:
    message: Message = {
        "type": "error",
        "kind": _error_kind(error),
        "error": f"{type(error).__name__}: {error}",
        "sentence": str(error),
        "traceback": traceback.format_exc(),
        "step": step,
    }
    return message | ({"copies": error.copies} if isinstance(error, Unreadable) else {})


def main(channel: socket.socket) -> int:
    """Run one trainer over ``channel``; returns the exit code of the process."""
    lines = channel.makefile("rb")
    line = lines.readline()
    if not line:
        return 0  # the host ended before it had anything to do for us
    assignment = decode(line)
    name_process(f"et-trainer-{assignment['rank']}")
    prefer_to_be_killed()
    if assignment.get("interface"):
        os.environ["GLOO_SOCKET_IFNAME"] = assignment["interface"]
    torch.set_num_threads(assignment["job"]["hosts"]["threads"])
    outage.begin(assignment["outage_seconds"])
    trainer = None
    try:
        trainer = Trainer(channel, lines, assignment)
        trainer.run()
    except BrokenPipeError:
        return 1  # the host is gone
    except Exception as error:
        message = _error_message(error, trainer.step + 1 if trainer else assignment["start_step"] + 1)
        if trainer is not None and message["kind"] in ("exception", "bad_step"):
            trainer.settle()  # else the step that was reached before would be done again, and again
        channel.sendall(encode(message))
        return 1
    lines.read()  # the snapshot stays valid without us; the host ends this process
    return 0
