"""Tier 2 from the coordinator's side: who uploads what, the manifest, the commit, retention."""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastic_train import __version__
from elastic_train.checkpoint.catalog import commit
from elastic_train.checkpoint.checksums import BLOCK_BYTES
from elastic_train.checkpoint.claims import Claim, go_on_from, require_newest
from elastic_train.checkpoint.errors import CheckpointError, Fenced
from elastic_train.checkpoint.manifest import CheckpointId, Manifest, UploadedObject, merge, object_path
from elastic_train.checkpoint.tidy import Tidied, tidy
from elastic_train.checkpoint.upload import assign_chunks
from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.inventory import Inventory, SnapshotSet
from elastic_train.controller.job_folder import JobFolder, config_digest
from elastic_train.controller.resumption import fall_back
from elastic_train.controller.wire import Message
from elastic_train.storage.errors import StorageError


class UploadFailed(Exception):
    """A host could not upload its part, or is gone; or the job has gone back before that step meanwhile."""


@dataclass(slots=True)
class Save:
    """A save that is going on or over. Counts of retries are those of all requests for it, by cause."""

    step: int
    generation: int
    started: float = field(default_factory=time.monotonic)
    manifest: Manifest | None = None
    retries: Counter[str] = field(default_factory=Counter)
    tidied: Tidied = field(default_factory=Tidied)
    gone_back_to: int | None = None
    """The job has gone on from this earlier step meanwhile: what was saved is no longer its history."""

    seconds: float = 0.0
    """from the order of the uploads to the commit"""

    @property
    def seconds_so_far(self) -> float:
        return time.monotonic() - self.started

    def report(self) -> dict[str, object]:
        """The fields of the event of a save that was committed."""
        assert self.manifest is not None
        nbytes = self.manifest.nbytes
        return {
            "step": self.step,
            "generation": self.generation,
            "seconds": round(self.seconds, 3),
            "bytes": nbytes,
            "mb_per_second": round(nbytes / 1e6 / self.seconds, 3),
            "retries": dict(self.retries),
        }


async def _all_of(answers: Sequence[asyncio.Future[UploadedObject]]) -> list[UploadedObject]:
    """The answers; or the first error, once all are over: until then the hosts hold buffers that the next save needs.

    A host always answers or is lost: an upload ends within storage's budget of retries.
    """
    await asyncio.gather(*answers, return_exceptions=True)
    return [answer.result() for answer in answers]


def holder_name() -> str:
    """For people who ask who holds a claim."""
    return f"{socket.gethostname()} pid {os.getpid()}"


class Checkpointer:
    """Saves finished steps, one at a time, as the holder of a claim.

    A save of a generation that is over meanwhile is committed all the same: its step was finished, all of its bytes
    are of that one step and generation (the images are looked at before and after they are read, and the paths are
    this save's alone), so it is as good a state of the job as any. Only when the job has gone back before that step is
    it not: then the steps after it are computed anew and logged anew, and the old ones must not come back.

    Args:
        hosts: that are there, by node.
    """

    def __init__(
        self, job: Job, folder: JobFolder, inventory: Inventory, hosts: Mapping[str, Sequence[HostRecord]]
    ) -> None:
        self._job, self._folder, self._inventory, self._hosts = job, folder, inventory, hosts
        self._busy = asyncio.Lock()
        self._claiming = asyncio.Lock()
        """held while the claim is compared or replaced: a claim that this coordinator takes itself fences nobody"""
        self._waiting: dict[int, dict[str, asyncio.Future[UploadedObject]]] = defaultdict(dict)
        """host number -> object -> answer"""
        self._count = 0
        self._plans: dict[int, dict[int, list[int]]] = {}
        """generation -> which of its chunks each rank uploads: the same for all of its steps"""
        self.claim: Claim | None = None
        self.committed: CheckpointId | None = None
        """where the job goes on when everything in memory is lost"""
        self.committed_generation: int | None = None
        """the generation it was written by; None when that was in an earlier submission"""
        self.running: Save | None = None
        self.data_digest = ""
        self._unsure = 0
        """newest step whose commit got no answer: it may be there, now or later"""
        self._gone_back_to: int | None = None
        """the job has gone back to this step since, before one that may be there: the next claim is due, from it"""

    async def save(
        self, snapshots: SnapshotSet, layout: Layout, members: Sequence[HostRecord], metrics: Mapping[str, float]
    ) -> Save:
        """Upload and commit a finished step; only when no save is ``running``.

        ``members[rank]`` is the host whose trainer writes the rank's images: only it can keep an image from being
        written over while it is read.

        The upload orders are sent before this first waits, so a host pins the images before it hears anything later.

        Raises:
            Fenced: another submission has taken over; nothing that this one does counts any more.
            UploadFailed, StorageError, CheckpointError: nothing was committed.
        """
        async with self._busy:
            return await self._save(snapshots, layout, members, metrics)

    async def plan(self, generation: int) -> None:
        """Decide which rank uploads what of any step of ``generation``, all of whose ranks have told what they hold.

        Before its first step is finished, which may be one to be saved.

        In a thread: of ten thousand ranks it takes seconds, in which hosts would hear no answer to their heartbeats.
        """
        if generation in self._plans or generation not in self._inventory.directories:
            return
        described = self._inventory.described(generation)
        planned = await asyncio.get_running_loop().run_in_executor(None, assign_chunks, described)
        self._keep_plan(generation, planned)

    def _keep_plan(self, generation: int, plan: dict[int, list[int]]) -> None:
        kept = {number: plan for number, plan in self._plans.items() if number in self._inventory.directories}
        self._plans = kept | {generation: plan}

    async def finish(
        self, snapshots: SnapshotSet | None, layout: Layout | None, metrics: Mapping[str, float]
    ) -> Save | None:
        """The job's last checkpoint, of the newest finished step, unless that is committed already."""
        async with self._busy:
            committed = self.committed.step if self.committed else 0
            if snapshots is None or layout is None or snapshots.step <= committed:
                return None
            return await self._save(snapshots, layout, (), metrics)

    def go_back(self, step: int) -> None:
        """The job goes on from ``step``: a save of a later step that is still going on must not be committed."""
        if self.running is not None and self.running.step > step:
            self.running.gone_back_to = step
        if self._unsure > step:
            self._gone_back_to = step

    async def check_claim(self) -> None:
        """Raises Fenced when another submission has taken over; a storage that does not answer says nothing."""
        async with self._claiming:
            assert self.claim is not None
            try:
                await self._renew_claim()
                await asyncio.get_running_loop().run_in_executor(None, require_newest, self._folder.store, self.claim)
            except Fenced:
                raise
            except (StorageError, CheckpointError):
                pass  # no answer, or a damaged record: the next commit, which needs one, says so

    async def fall_back(self, damaged: CheckpointId) -> list[str]:
        """Go on from the checkpoint before ``damaged``, in which a rank has found wrong bytes.

        Returns a sentence for each newer one that is refused, too. Raises Fenced, StorageError, CheckpointError.
        """
        async with self._claiming:
            assert self.claim is not None
            loop, store = asyncio.get_running_loop(), self._folder.store
            taken = await loop.run_in_executor(None, fall_back, store, self.claim, time.time(), (damaged,))
            self.claim, self.committed, self.committed_generation = taken.claim, taken.checkpoint, None
            self._unsure, self._gone_back_to = 0, None
        return taken.refused

    async def _renew_claim(self) -> None:
        """What may have been committed after the step to which the job has gone back counts no longer."""
        assert self.claim is not None
        if self._gone_back_to is not None:
            loop, store, step = asyncio.get_running_loop(), self._folder.store, self._gone_back_to
            self.claim = await loop.run_in_executor(None, go_on_from, store, self.claim, step, time.time())
            self._unsure, self._gone_back_to = 0, None

    async def _save(
        self, snapshots: SnapshotSet, layout: Layout, members: Sequence[HostRecord], metrics: Mapping[str, float]
    ) -> Save:
        assert self.claim is not None
        save = self.running = Save(snapshots.step, snapshots.generation)
        claim = self.claim
        try:
            if self._gone_back_to is not None:  # only then are orders sent late: a host may have gone on, and say so
                async with self._claiming:
                    await self._renew_claim()
                    claim = self.claim
            uploads = await _all_of(self._upload(snapshots, members, claim, save))
            self._require_wanted(save)
            parts = snapshots, layout, uploads, claim, metrics
            manifest = await asyncio.get_running_loop().run_in_executor(None, self._manifest, *parts)
            await self._commit(save, manifest, claim)
        except Fenced as error:
            async with self._claiming:
                if self.claim is claim:
                    raise
            raise UploadFailed(f"the job has gone back before step {save.step} meanwhile") from error
        finally:
            self.running = None
        return save

    async def _commit(self, save: Save, manifest: Manifest, claim: Claim) -> None:
        loop, store = asyncio.get_running_loop(), self._folder.store
        before = Counter(store.retries)
        # First the lines of the steps that it stands for: a job that goes on from it could not write them again.
        await loop.run_in_executor(None, self._folder.flush_history)
        self._require_wanted(save)
        self._unsure = max(self._unsure, save.step)
        committed = await loop.run_in_executor(None, commit, store, manifest, claim)
        if save.gone_back_to is not None:  # too late to keep it from being created, so it is made to count no longer
            async with self._claiming:
                await self._renew_claim()
            self._require_wanted(save)
        self._unsure = 0
        save.manifest, save.seconds, self.committed = committed.manifest, save.seconds_so_far, committed.manifest.id
        # One that was there already has the same bits only when it is this save's own, committed by a lost answer.
        self.committed_generation = save.generation if committed.manifest.objects == manifest.objects else None
        save.tidied = await loop.run_in_executor(None, tidy, store, claim, self._job.checkpoint)
        save.retries += Counter(store.retries) - before  # hosts have told of their own

    def _require_wanted(self, save: Save) -> None:
        if save.gone_back_to is not None:
            raise UploadFailed(f"the job has gone back to step {save.gone_back_to} meanwhile")

    def _upload(
        self, snapshots: SnapshotSet, members: Sequence[HostRecord], claim: Claim, save: Save
    ) -> list[asyncio.Future[UploadedObject]]:
        """Orders the uploads of all ranks; the answers."""
        self._count += 1
        attempt = f"c{claim.number}-{self._count}"
        generation = snapshots.generation
        if generation not in self._plans:
            self._keep_plan(generation, assign_chunks(self._inventory.described(generation)))
        replies = []
        for rank, indices in self._plans[generation].items():
            if indices:
                path = object_path(save.step, save.generation, rank, attempt)
                writer = members[rank] if members else None
                text = self._inventory.descriptions[generation, rank]
                replies.append(self._order(snapshots, rank, text, indices, path, writer))
        return replies

    def _manifest(
        self,
        snapshots: SnapshotSet,
        layout: Layout,
        uploads: Sequence[UploadedObject],
        claim: Claim,
        metrics: Mapping[str, float],
    ) -> Manifest:
        tensors, objects = merge(uploads)
        return Manifest(
            step=snapshots.step,
            claim=claim.number,
            created=time.time(),
            metrics=dict(metrics),
            block_bytes=BLOCK_BYTES,
            cursor=snapshots.step * self._job.training.global_batch,
            generation=snapshots.generation,
            seed=self._job.seed,
            layout=layout.as_dict(),
            config_digest=config_digest(self._job),
            data_digest=self.data_digest,
            model=self._job.model.model_dump(mode="json"),
            versions={"elastic_train": __version__, "python": platform.python_version()},
            objects=objects,
            tensors=tensors,
        )

    def _order(
        self,
        snapshots: SnapshotSet,
        rank: int,
        description: str,
        chunks: list[int],
        path: str,
        writer: HostRecord | None,
    ) -> asyncio.Future[UploadedObject]:
        """Ask the host that writes the rank's image for the upload; once nobody does, one that has it and stays."""
        holders = snapshots.holders[rank]
        there = sorted((h for node in holders for h in self._hosts.get(node, ())), key=lambda host: host.leaving)
        host = next((host for host in there if writer is None or host is writer), None)
        future: asyncio.Future[UploadedObject] = asyncio.get_running_loop().create_future()
        if host is None:
            future.set_exception(UploadFailed(f"no living host holds rank {rank} of step {snapshots.step}"))
            return future
        self._waiting[host.number][path] = future
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

    def reads_from(self, host: HostRecord) -> bool:
        """Whether ``host`` still uploads for a save."""
        return bool(self._waiting.get(host.number))

    def uploaded(self, host: HostRecord, message: Message) -> None:
        """A host's answer to an order."""
        future = self._waiting.get(host.number, {}).pop(message["object"], None)
        if future is None or future.done():
            return
        if "error" in message:
            future.set_exception(UploadFailed(f"{host.label}: {message['error']}"))
            return
        if self.running is not None:
            self.running.retries.update(message.get("retries", {}))
        future.set_result(UploadedObject.model_validate(message["uploaded"]))

    def host_lost(self, host: HostRecord) -> None:
        for future in self._waiting.pop(host.number, {}).values():
            if not future.done():
                future.set_exception(UploadFailed(f"{host.label} was lost during its upload"))
