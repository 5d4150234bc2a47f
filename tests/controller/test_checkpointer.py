from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from elastic_train.checkpoint.catalog import list_checkpoints, load_manifest, read_catalog
from elastic_train.checkpoint.claims import announce
from elastic_train.checkpoint.description import Description
from elastic_train.checkpoint.errors import Fenced
from elastic_train.checkpoint.image import Image
from elastic_train.checkpoint.manifest import CheckpointId
from elastic_train.checkpoint.upload import upload_image
from elastic_train.config.layout import Layout
from elastic_train.controller import checkpointer
from elastic_train.controller.checkpointer import Checkpointer, Save, UploadFailed
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.inventory import Inventory, SnapshotSet
from elastic_train.controller.job_folder import JobFolder
from elastic_train.controller.resumption import take_over
from elastic_train.controller.wire import Message
from elastic_train.storage.errors import StorageError
from tests.checkpoint.states import even_layout, some_tensors, write_images
from tests.jobs import make_job


class Hosts:
    """Two hosts on two nodes; their orders wait until the test has them carried out."""

    def __init__(self, images: Path) -> None:
        self.images = images
        self.orders: list[tuple[int, Message]] = []
        self.records = {number: self._record(number) for number in (1, 2)}

    def _record(self, number: int) -> HostRecord:
        hosts = self

        class Connection:
            def send(self, message: Message) -> None:
                hosts.orders.append((number, message))

        connection: Any = Connection()
        return HostRecord(number, connection, 1, f"node{number}", "", ("", 0), "", 0.0)


class Case:
    """A checkpointer with the claim of a fresh job, and finished steps of generation 1."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = JobFolder(make_job(tmp_path, tmp_path, "job", "checkpoint.keep_last=2"))
        self.store, self.path = self.folder.store, tmp_path
        self.inventory, self.hosts = Inventory(), Hosts(tmp_path)
        self.inventory.open_generation(1, 2)
        job = make_job(tmp_path, tmp_path, "job", "checkpoint.keep_last=2")
        self.by_node = {record.node: [record] for record in self.hosts.records.values()}
        self.saves = Checkpointer(job, self.folder, self.inventory, self.by_node)
        self.saves.claim = take_over(self.store, "first", 1.0).claim

    def finished(self, step: int) -> SnapshotSet:
        snapshots = None
        for rank, image in enumerate(write_images(self.path, even_layout(some_tensors(step), 2), step, 1, buffer=step)):
            self.inventory.describe(1, rank, Image.open(image).description().to_json())
            snapshots = self.inventory.add(1, rank, step, f"node{rank + 1}", image.name)
        assert snapshots is not None
        return snapshots

    def save(self, step: int) -> asyncio.Task[Save]:
        members = list(self.hosts.records.values())
        return asyncio.ensure_future(self.saves.save(self.finished(step), Layout(dp_shard=2), members, {"loss": 2.0}))

    async def carry_out(self) -> None:
        """All orders of a save, as soon as they are there."""
        while not self.hosts.orders:
            await asyncio.sleep(0.001)
        for number, order in self.hosts.orders:
            image, description = Image.open(self.path / order["image"]), Description.from_json(order["description"])
            done = upload_image(image, order["step"], description, order["chunks"], self.store, order["object"])
            answer = {"object": order["object"], "uploaded": done.model_dump(mode="json"), "retries": {"SlowDown": 2}}
            self.saves.uploaded(self.hosts.records[number], answer)
        self.hosts.orders = []


def run(tmp_path: Path, test: Any) -> None:
    asyncio.run(test(Case(tmp_path)))


def test_a_save_reports_what_it_was(tmp_path: Path) -> None:
    async def test(case: Case) -> None:
        saving = case.save(10)
        await case.carry_out()
        save = await saving
        assert case.saves.running is None
        report = save.report()
        manifest = load_manifest(case.store, 10)
        assert (report["step"], report["generation"], report["bytes"]) == (10, 1, manifest.nbytes)
        assert report["retries"] == {"SlowDown": 4}
        assert save.seconds > 0
        assert manifest.metrics == {"loss": 2.0}
        assert case.saves.committed == CheckpointId(10, 1)
        assert {path.split("/")[1] for path in manifest.objects} == {"step-00000010-g1-c1-1"}

    run(tmp_path, test)


def test_a_save_of_a_step_before_which_the_job_has_gone_back_is_not_committed(tmp_path: Path) -> None:
    async def test(case: Case) -> None:
        saving = case.save(20)
        await asyncio.sleep(0)
        case.saves.go_back(20)  # not before it
        case.saves.go_back(15)
        await case.carry_out()
        with pytest.raises(UploadFailed, match="gone back to step 15"):
            await saving
        assert list_checkpoints(case.store) == []
        saving = case.save(16)
        await case.carry_out()
        assert (await saving).step == 16

    run(tmp_path, test)


def test_one_that_is_committed_at_that_very_moment_counts_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(case: Case) -> None:
        loop, create = asyncio.get_running_loop(), case.store.create

        def create_and_go_back(path: str, data: bytes) -> None:
            create(path, data)
            if path == CheckpointId(20, 1).path:
                loop.call_soon_threadsafe(case.saves.go_back, 15)

        monkeypatch.setattr(case.store, "create", create_and_go_back)
        saving = case.save(10)
        await case.carry_out()
        await saving
        saving = case.save(20)
        await case.carry_out()
        with pytest.raises(UploadFailed, match="gone back to step 15"):
            await saving
        assert case.saves.committed == CheckpointId(10, 1)
        assert list_checkpoints(case.store) == [10]
        assert read_catalog(case.store).fenced == [CheckpointId(20, 1)]
        saving = case.save(20)
        await case.carry_out()
        assert (await saving).manifest == load_manifest(case.store, 20)
        assert case.saves.committed == CheckpointId(20, 2)

    run(tmp_path, test)


def test_one_that_is_gone_back_before_while_its_lines_are_written_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the last byte of the uploads and the manifest."""

    async def test(case: Case) -> None:
        loop, flush = asyncio.get_running_loop(), case.folder.flush_history

        def flush_and_go_back() -> None:
            flush()
            gone = threading.Event()
            loop.call_soon_threadsafe(lambda: (case.saves.go_back(15), gone.set()))
            gone.wait()

        saving = case.save(10)
        await case.carry_out()
        await saving
        monkeypatch.setattr(case.folder, "flush_history", flush_and_go_back)
        saving = case.save(20)
        await case.carry_out()
        with pytest.raises(UploadFailed, match="gone back to step 15"):
            await saving
        assert list_checkpoints(case.store) == [10]
        assert not case.store.list(CheckpointId(20, 1).path)

    run(tmp_path, test)


@pytest.mark.parametrize("by", ["the watch", "the next save"])
def test_a_commit_without_an_answer_counts_no_longer_once_the_job_has_gone_back_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Its manifest may come to be at any time: a resubmission would go on from steps that the job has not had."""

    async def test(case: Case) -> None:
        create, late = case.store.create, dict[str, bytes]()

        def without_an_answer(path: str, data: bytes) -> None:
            late[path] = data
            raise StorageError(path, "no answer")

        saving = case.save(10)
        await case.carry_out()
        await saving
        monkeypatch.setattr(case.store, "create", without_an_answer)
        saving = case.save(20)
        await case.carry_out()
        with pytest.raises(StorageError, match="no answer"):
            await saving
        case.saves.go_back(15)
        await case.saves.check_claim()  # storage is still away
        monkeypatch.setattr(case.store, "create", create)
        manifest = CheckpointId(20, 1).path
        if by == "the watch":
            await case.saves.check_claim()
        create(manifest, late[manifest])
        saving = case.save(18)
        await case.carry_out()
        assert (await saving).step == 18
        assert list_checkpoints(case.store) == [10, 18]
        assert read_catalog(case.store).fenced == [CheckpointId(20, 1)]
        assert case.saves.committed == CheckpointId(18, 2)

    run(tmp_path, test)


def test_one_that_has_its_answer_and_is_gone_back_before_is_no_reason_for_a_claim(tmp_path: Path) -> None:
    async def test(case: Case) -> None:
        saving = case.save(10)
        await case.carry_out()
        await saving
        case.saves.go_back(5)  # cannot be: what is committed is where it would go on
        await case.saves.check_claim()
        assert case.saves.claim is not None and case.saves.claim.number == 1

    run(tmp_path, test)


def test_who_is_superseded_gets_told_so_and_its_own_new_claim_is_no_other_submission(tmp_path: Path) -> None:
    async def test(case: Case) -> None:
        for step in (10, 20):
            saving = case.save(step)
            await case.carry_out()
            await saving
        saving = case.save(30)
        await asyncio.sleep(0)
        await case.saves.fall_back(CheckpointId(20, 1))
        await case.saves.check_claim()
        assert case.saves.committed == CheckpointId(10, 1)
        await case.carry_out()
        with pytest.raises(UploadFailed, match="gone back before step 30"):
            await saving
        announce(case.store, "somebody else", 2.0)
        with pytest.raises(Fenced, match="somebody else"):
            await case.saves.check_claim()
        saving = case.save(20)
        await case.carry_out()
        with pytest.raises(Fenced, match="somebody else"):
            await saving
        assert list_checkpoints(case.store) == [10]

    run(tmp_path, test)


def test_a_lost_host_ends_the_save_once_the_others_are_at_the_end_of_their_parts(tmp_path: Path) -> None:
    """Else the next save would find their buffers taken."""

    async def test(case: Case) -> None:
        saving = case.save(10)
        await asyncio.sleep(0)
        case.saves.host_lost(case.hosts.records[2])
        await asyncio.sleep(0)
        assert case.saves.running is not None and not saving.done()
        await case.carry_out()
        with pytest.raises(UploadFailed, match=r"host 2 .* was lost during its upload"):
            await saving
        assert case.saves.running is None
        assert list_checkpoints(case.store) == []

    run(tmp_path, test)


def test_the_last_checkpoint_is_uploaded_by_whoever_is_there_and_has_the_images(tmp_path: Path) -> None:
    async def test(case: Case) -> None:
        snapshots = case.finished(10)
        snapshots.hold(0, "node2", snapshots.holders[0]["node1"].image)
        del case.by_node["node1"]
        saving = asyncio.ensure_future(case.saves.finish(snapshots, Layout(dp_shard=2), {}))
        await asyncio.sleep(0)
        assert [number for number, _ in case.hosts.orders] == [2, 2]
        await case.carry_out()
        assert (await saving) is not None
        assert list_checkpoints(case.store) == [10]

    run(tmp_path, test)


def test_a_plan_that_ends_late_does_not_replace_that_of_another_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(case: Case) -> None:
        case.finished(10)
        case.inventory.open_generation(2, 1)
        case.inventory.describe(2, 0, case.inventory.descriptions[1, 0])
        first, both = threading.Event(), checkpointer.assign_chunks

        def late(described: dict[int, Description]) -> dict[int, list[int]]:
            if len(described) == 2:
                first.wait()
            return both(described)

        monkeypatch.setattr(checkpointer, "assign_chunks", late)
        older = asyncio.ensure_future(case.saves.plan(1))
        await asyncio.sleep(0)
        await case.saves.plan(2)
        first.set()
        await older
        monkeypatch.setattr(checkpointer, "assign_chunks", None)  # neither is made again
        await case.saves.plan(2)
        await case.saves.plan(1)

    run(tmp_path, test)
