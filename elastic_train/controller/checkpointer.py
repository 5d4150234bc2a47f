"""Tier 2 from the coordinator's side: who uploads what, the manifest, the commit, retention."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import secrets
import socket
import time
from collections.abc import Mapping, Sequence

from elastic_train import __version__
from elastic_train.checkpoint.catalog import commit
from elastic_train.checkpoint.checksums import BLOCK_BYTES
from elastic_train.checkpoint.claims import FRESH, Claim, take_claim
from elastic_train.checkpoint.description import Description
from elastic_train.checkpoint.manifest import Manifest, UploadedObject, merge, object_path
from elastic_train.checkpoint.retention import Removed, keep_last
from elastic_train.checkpoint.upload import assign_chunks
from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.controller.inventory import Inventory, SnapshotSet
from elastic_train.controller.job_folder import JobFolder, config_digest
from elastic_train.controller.members import HostRecord
from elastic_train.controller.wire import Message

logger = logging.getLogger(__name__)


class UploadFailed(Exception):
    """A host could not upload its part, or is gone."""


class Checkpointer:
    """Saves finished steps, one at a time."""

    def __init__(self, job: Job, folder: JobFolder, inventory: Inventory, hosts: Mapping[int, HostRecord]) -> None:
        self._job, self._folder, self._inventory, self._hosts = job, folder, inventory, hosts
        self._busy = asyncio.Lock()
        self._waiting: dict[tuple[str, int], asyncio.Future[UploadedObject]] = {}
        """(object, host number) -> answer"""
        self._attempt = secrets.token_hex(4)
        """Makes the objects of two coordinators of one job differ in their paths, whatever their generations are."""
        self._claim: Claim | None = None
        self.committed_step = 0
        self.data_digest = ""

    def take_claim(self, from_step: int | None) -> None:
        """From now on this coordinator's commits are the ones that count. ``from_step``: where the job goes on.

        Raises:
            StorageError: the job folder cannot be written.
        """
        holder = f"{socket.gethostname()} pid {os.getpid()}"
        self._claim = take_claim(self._folder.store, FRESH if from_step is None else from_step, holder, time.time())

    async def save(self, snapshots: SnapshotSet, layout: Layout, members: Sequence[HostRecord]) -> Manifest | None:
        """Upload and commit a finished step; None when an earlier save is still going on (the step is skipped).

        ``members[rank]`` is the host whose trainer writes the rank's images: only it can keep an image from being
        written over while it is read.

        The upload orders are sent before this first waits, so a host pins the images before it hears anything later.

        Raises:
            UploadFailed, StorageError, CheckpointError: nothing was committed.
        """
        if self._busy.locked():
            return None
        async with self._busy:
            return await self._save(snapshots, layout, members)

    async def finish(self, snapshots: SnapshotSet | None, layout: Layout | None) -> Manifest | None:
        """The job's last checkpoint, of the newest finished step, unless that is committed already."""
        async with self._busy:
            if snapshots is None or layout is None or snapshots.step <= self.committed_step:
                return None
            return await self._save(snapshots, layout)

    async def _save(self, snapshots: SnapshotSet, layout: Layout, members: Sequence[HostRecord] = ()) -> Manifest:
        step, generation = snapshots.step, snapshots.generation
        texts = {rank: self._inventory.descriptions[generation, rank] for rank in range(snapshots.world_size)}
        assigned = assign_chunks({rank: Description.from_json(text) for rank, text in texts.items()})
        replies = []
        for rank, indices in assigned.items():
            if indices:
                writer = members[rank] if members else None
                replies.append(self._order(snapshots, rank, texts[rank], indices, writer))
        uploads = await asyncio.gather(*replies)
        tensors, objects = merge(uploads)
        assert self._claim is not None
        manifest = Manifest(
            step=step,
            claim=self._claim.number,
            created=time.time(),
            metrics={},
            block_bytes=BLOCK_BYTES,
            cursor=step * self._job.training.global_batch,
            generation=generation,
            seed=self._job.seed,
            layout=layout.as_dict(),
            config_digest=config_digest(self._job),
            data_digest=self.data_digest,
            model=self._job.model.model_dump(mode="json"),
            versions={"elastic_train": __version__, "python": platform.python_version()},
            objects=objects,
            tensors=tensors,
        )
        loop = asyncio.get_running_loop()
        # First the lines of the steps that it stands for: a job that goes on from it could not write them again.
        await loop.run_in_executor(None, self._folder.flush_history)
        committed = await loop.run_in_executor(None, commit, self._folder.store, manifest, self._claim)
        self.committed_step = step
        await loop.run_in_executor(None, self._retain)
        return committed.manifest

    def _order(
        self,
        snapshots: SnapshotSet,
        rank: int,
        description: str,
        chunks: list[int],
        writer: HostRecord | None,
    ) -> asyncio.Future[UploadedObject]:
        """Ask the host that writes the rank's image for the upload; once nobody writes it, any that holds it."""
        holders = snapshots.holders[rank]
        there = self._hosts.values() if writer is None else [host for host in (writer,) if host.number in self._hosts]
        host = next((host for host in there if host.node in holders), None)
        future: asyncio.Future[UploadedObject] = asyncio.get_running_loop().create_future()
        if host is None:
            future.set_exception(UploadFailed(f"no living host holds rank {rank} of step {snapshots.step}"))
            return future
        path = object_path(snapshots.step, snapshots.generation, rank, self._attempt)
        self._waiting[path, host.number] = future
        host.connection.send(
            {
                "type": "upload",
                "image": holders[host.node].image,
                "step": snapshots.step,
                "description": description,
                "chunks": chunks,
                "object": path,
            }
        )
        return future

    def uploaded(self, host: HostRecord, message: Message) -> None:
        """A host's answer to an order."""
        future = self._waiting.pop((message["object"], host.number), None)
        if future is None or future.done():
            return
        if "error" in message:
            future.set_exception(UploadFailed(f"{host.label}: {message['error']}"))
        else:
            future.set_result(UploadedObject.model_validate(message["uploaded"]))

    def host_lost(self, host: HostRecord) -> None:
        for path, number in list(self._waiting):
            if number == host.number:
                future = self._waiting.pop((path, number))
                if not future.done():
                    future.set_exception(UploadFailed(f"{host.label} was lost during its upload"))

    def _retain(self) -> Removed:
        return keep_last(self._folder.store, self._job.checkpoint.keep_last)
