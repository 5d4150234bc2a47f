"""The trainer process: computes for one generation, is never repaired and may be killed at any moment.

Forked by the host's forkserver with one socket to the host. The host's first line is the assignment; everything the
trainer has to tell goes back as lines: ``phase``, ``described``, ``stepped``, ``completed`` or ``error``.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from elastic_train.checkpoint.capture import Capture
from elastic_train.checkpoint.description import Description
from elastic_train.checkpoint.errors import DamagedChunk
from elastic_train.checkpoint.image import Image, image_name
from elastic_train.checkpoint.manifest import CheckpointId, read_manifest
from elastic_train.checkpoint.reader import Part, restore
from elastic_train.checkpoint.restore_checkpoint import parts_of
from elastic_train.checkpoint.sources import ChunkSource, ImageSource, RemoteSource
from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.controller.control_block import ControlBlock
from elastic_train.controller.process_control import name_process
from elastic_train.controller.wire import Message, decode, encode
from elastic_train.data.batches import StepBatches
from elastic_train.data.dataset import TokenDataset
from elastic_train.data.evaluation import open_evaluation
from elastic_train.data.order import SampleOrder
from elastic_train.model.hf_folder import open_source
from elastic_train.storage.store import Store
from elastic_train.training.engine import Engine
from elastic_train.training.state_keys import state_keys

_POLL_SECONDS = 0.0005
_GROUP_TIMEOUT = timedelta(minutes=30)
"""Only a last resort: the coordinator kills a generation long before its collectives time out."""


class NonFiniteLoss(RuntimeError):
    """Loss or gradient norm is NaN or infinite; no rank has updated its weights."""


class Trainer:
    """One rank of one generation, as told by ``assignment``."""

    def __init__(self, channel: socket.socket, assignment: Message) -> None:
        self._channel = channel
        self._job = Job.model_validate(assignment["job"], strict=False)
        self._generation: int = assignment["generation"]
        self._rank: int = assignment["rank"]
        self._layout = Layout(**assignment["layout"])
        self._assignment = assignment
        self._control = ControlBlock(assignment["control"])
        self._images: dict[int, Image] = {}
        self.step: int = assignment["start_step"]

    def tell(self, message: Message) -> None:
        self._channel.sendall(encode(message))

    def run(self) -> None:
        """Form the group, take the state, then step until the job's last step."""
        started = time.time()
        self._join_group()
        self._phase("group", started)
        started = time.time()
        engine = self._build_engine()
        self._phase("build", started)
        started = time.time()
        self._take_state(engine)
        self._phase("restore", started)
        capture = Capture(engine.state())
        self.tell({"type": "described", "description": capture.description.to_json()})
        for step in range(self.step + 1, self._job.training.steps + 1):
            self._run_step(engine, capture, step)
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

    def _build_engine(self) -> Engine:
        dataset = TokenDataset.open(self._job.data.uri, self._job.data.sequence_length, self._job.storage)
        order = SampleOrder(len(dataset), self._job.seed)
        batches = StepBatches(dataset, order, self._job.training)
        engine = Engine(self._job, self._layout, self._rank, batches, open_evaluation(self._job, dataset))
        engine.on_progress = self._control.beat
        return engine

    def _take_state(self, engine: Engine) -> None:
        """Fresh weights (random, or of ``init_from``), the snapshots named in the assignment, or a checkpoint."""
        plan: dict[str, Any] = self._assignment["restore"]
        if plan["kind"] == "fresh":
            engine.initialize(open_source(self._job))
            return
        parts = self._snapshot_parts(plan) if plan["kind"] == "snapshots" else self._checkpoint_parts(plan)
        restored = restore(engine.state(), parts, rank=self._rank, expected_keys=state_keys(self._job))
        engine.publish()
        for part in parts:
            part.source.close()
        self.tell({"type": "restored", "bytes": dict(restored.bytes_read), "passed_over": restored.passed_over})

    def _snapshot_parts(self, plan: dict[str, Any]) -> list[Part]:
        parts = []
        for entry in plan["parts"]:
            source: ChunkSource
            if entry["local"]:
                source = ImageSource(Path(entry["image"]), plan["step"])
            else:
                address = (entry["address"][0], entry["address"][1])
                source = RemoteSource(address, self._assignment["token"], entry["image"], plan["step"])
            parts.append(Part(Description.from_json(entry["description"]), source))
        return parts

    def _checkpoint_parts(self, plan: dict[str, Any]) -> list[Part]:
        store = Store.open(self._assignment["job_folder"], self._job.storage)
        return parts_of(store, read_manifest(store, CheckpointId(plan["step"], plan["claim"])))

    def _run_step(self, engine: Engine, capture: Capture, step: int) -> None:
        self._control.start(step)
        started, cpu_started = time.time(), time.process_time()
        metrics = engine.train_step(step)
        computed = time.time()
        if not all(map(_is_finite, (metrics.loss, metrics.grad_norm))):
            raise NonFiniteLoss(
                f"step {step}: loss={metrics.loss}, grad_norm={metrics.grad_norm}; no weight was changed"
            )
        buffer = self._wait_for_buffer(step - 1)
        copy_started = time.time()
        capture.write(self._image(buffer, capture), step)
        self.step = step
        self.tell(
            {
                "type": "stepped",
                "step": step,
                "buffer": buffer,
                "image": self._image_name(buffer),
                "loss": metrics.loss,
                "grad_norm": metrics.grad_norm,
                "lr": metrics.lr,
                "valid_tokens": metrics.valid_tokens,
                **metrics.evaluation(),
                "eval_seconds": engine.evaluation_seconds,
                "seconds": computed - started - engine.evaluation_seconds,
                "cpu_seconds": time.process_time() - cpu_started,
                "snapshot_seconds": time.time() - copy_started,
                "stall_seconds": copy_started - computed,
            }
        )

    def _wait_for_buffer(self, finished: int) -> int:
        """The buffer for the next snapshot; its old content is free once step ``finished`` is whole everywhere."""
        while self._control.finished_step < finished:
            time.sleep(_POLL_SECONDS)
        return self._control.next_buffer

    def _image_name(self, buffer: int) -> str:
        return image_name(self._generation, self._rank, buffer)

    def _image(self, buffer: int, capture: Capture) -> Image:
        if buffer not in self._images:
            path = Path(self._assignment["pool"]) / self._image_name(buffer)
            self._images[buffer] = Image.create(path, self._generation, self._rank, capture.description)
        return self._images[buffer]


def _is_finite(value: float) -> bool:
    return value - value == 0.0


def _error_kind(error: BaseException) -> str:
    """``peer`` for the echo of somebody else's end, ``damaged`` for a bad checkpoint, ``exception`` for the rest."""
    if isinstance(error, DamagedChunk):
        return "damaged"
    lost_peer = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
    return "peer" if lost_peer else "exception"


def main(channel: socket.socket) -> int:
    """Run one trainer over ``channel``; returns the exit code of the process."""
    with channel.makefile("rb") as reader:
        line = reader.readline()
    if not line:
        return 0  # the host ended before it had anything to do for us
    assignment = decode(line)
    name_process(f"et-trainer-{assignment['rank']}")
    if assignment.get("interface"):
        os.environ["GLOO_SOCKET_IFNAME"] = assignment["interface"]
    torch.set_num_threads(assignment["job"]["hosts"]["threads"])
    trainer = None
    try:
        trainer = Trainer(channel, assignment)
        trainer.run()
    except BrokenPipeError:
        return 1  # the host is gone
    except Exception as error:
        channel.sendall(
            encode(
                {
                    "type": "error",
                    "kind": _error_kind(error),
                    "error": f"{type(error).__name__}: {error}",
                    "traceback": traceback.format_exc(),
                    "step": trainer.step + 1 if trainer else assignment["start_step"] + 1,
                }
            )
        )
        return 1
    while channel.recv(4096):  # the snapshot stays valid without us; the host ends this process
        pass
    return 0
