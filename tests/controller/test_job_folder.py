from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_train.config.job import Job
from elastic_train.controller.job_folder import JobFolder, JobMismatch, config_digest, identity
from elastic_train.storage.errors import FutureFormat, StorageError
from tests.jobs import make_job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job(tmp_path / "no data", tmp_path / "runs", "mine")


def folder(job: Job) -> Path:
    return Path(job.storage.uri) / job.name


def opened(job: Job) -> JobFolder:
    opened = JobFolder(job)
    opened.open("digest")
    return opened


def changed(job: Job, *overrides: str) -> Job:
    return make_job(job.data.uri, job.storage.uri, job.name, *overrides)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_new_job_gets_its_record(job: Job) -> None:
    record = JobFolder(job).open("digest")
    assert json.loads((folder(job) / "job.json").read_text()) == record
    assert (record["format_version"], record["name"]) == (1, "mine")
    assert record["identity"]["global_batch"] == 8
    assert record["config"] == job.as_dict()


def test_the_same_job_is_opened_again_and_its_record_stays(job: Job) -> None:
    first = JobFolder(job).open("digest")
    assert JobFolder(job).open("digest") == first
    # What changes neither weights nor order may be changed from one submission to the next.
    other = changed(job, "hosts.max=9", "training.steps=99", "checkpoint.every_steps=1", "data.uri=elsewhere")
    assert JobFolder(other).open("digest") == first


def test_a_job_from_before_there_was_a_choice_of_packing_is_the_same_job(job: Job) -> None:
    record = JobFolder(job).open("digest")
    for key in ("packing", "tails", "mixture", "lora"):
        del record["identity"][key]
    (folder(job) / "job.json").write_text(json.dumps(record))
    assert JobFolder(job).open("digest") == record
    with pytest.raises(JobMismatch, match=r"packing='none' \(there: 'stream'\)"):
        JobFolder(changed(job, "data.packing=none")).open("digest")


@pytest.mark.parametrize("other", ["lora=null", "lora.rank=4", "lora.alpha=8", "lora.target_modules=all-linear"])
def test_a_job_keeps_its_adapters(job: Job, other: str) -> None:
    adapted = changed(job, "init_from=model", "lora.rank=8")
    JobFolder(adapted).open("digest")
    JobFolder(changed(job, "init_from=model", "lora={}")).open("digest")  # the defaults
    with pytest.raises(JobMismatch, match=r"lora=.*\(there: \{'rank': 8, 'alpha': 16\.0, "):
        JobFolder(changed(job, "init_from=model", "lora.rank=8", other)).open("digest")


def test_another_mask_is_another_job_also_of_a_record_that_does_not_say_so(job: Job) -> None:
    masked = changed(job, "data.document_mask=true")
    for first, other in ((job, masked), (masked, job)):
        record = JobFolder(first).open("digest")
        for mask in ({"document_mask": record["identity"].pop("document_mask")}, {}):
            kept = record | {"identity": record["identity"] | mask}
            (folder(job) / "job.json").write_text(json.dumps(kept))
            assert JobFolder(first).open("digest") == kept
            with pytest.raises(JobMismatch, match=r"document_mask=(True|False) \(there: (True|False)\)"):
                JobFolder(other).open("digest")
        (folder(job) / "job.json").unlink()
    packed = JobFolder(changed(job, "data.packing=documents")).open("digest")  # masks whatever document_mask says
    del packed["identity"]["document_mask"]
    (folder(job) / "job.json").write_text(json.dumps(packed))
    JobFolder(changed(job, "data.packing=documents", "data.document_mask=true")).open("digest")


def test_another_mixture_is_another_job(job: Job) -> None:
    def mixed(code: int, step: int) -> Job:
        sources = f"[{{name: code, uri: a, weight: {code}}}, {{name: prose, uri: b, weight: 1}}]"
        phases = f"[{{from_step: {step}, weights: {{code: 1, prose: 1}}}}]"
        return changed(job, "data.uri=null", f"data.sources={sources}", f"data.phases={phases}")

    JobFolder(mixed(3, 10)).open("digest")
    JobFolder(mixed(3, 10)).open("digest")
    for other in (job, mixed(2, 10), mixed(3, 11)):
        with pytest.raises(JobMismatch, match="mixture="):
            JobFolder(other).open("digest")


def test_another_job_of_the_name_is_refused_with_its_fields_and_both_values(job: Job) -> None:
    JobFolder(job).open("digest")
    other = changed(job, "seed=2", "training.global_batch=16", "data.sequence_length=64", "model.hidden_size=32")
    with pytest.raises(JobMismatch) as caught:
        JobFolder(other).open("digest")
    sentence = str(caught.value)
    for part in ("'mine'", "seed=2 (there: 1)", "global_batch=16 (there: 8)", "sequence_length=64 (there: 32)"):
        assert part in sentence
    assert "model.hidden_size=32 (there: 64)" in sentence
    assert "micro_batch" not in sentence
    assert "num_attention_heads" not in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.name=sgd",
        "training.ema_decay=0.9",
        "seed=7",
        "training.global_batch=4",
        "training.micro_batch=2",
        "data.sequence_length=16",
        "data.document_mask=true",
        "model.hidden_size=32",
    ],
)
def test_identity_is_what_decides_weights_and_order(job: Job, override: str) -> None:
    assert identity(changed(job, override), "digest") != identity(job, "digest")
    assert config_digest(changed(job, override)) != config_digest(job)


def test_the_digest_is_of_the_whole_job(job: Job) -> None:
    assert config_digest(changed(job)) == config_digest(job)
    assert config_digest(changed(job, "hosts.max=9")) != config_digest(job)
    assert identity(changed(job, "hosts.max=9"), "digest") == identity(job, "digest")


def test_a_later_format_is_not_read(job: Job) -> None:
    record = JobFolder(job).open("digest")
    (folder(job) / "job.json").write_text(json.dumps(record | {"format_version": 2}))
    with pytest.raises(FutureFormat, match=r"job\.json: is of format 2, and this release .* reads format 1; "):
        JobFolder(job).open("digest")


@pytest.mark.parametrize("content", [b"", b"{", b"\x80\x04.", b"[]", b"null", b"{}", b'{"format_version": 1}'])
def test_a_record_that_is_none_is_refused_by_name(job: Job, content: bytes) -> None:
    JobFolder(job).open("digest")
    (folder(job) / "job.json").write_bytes(content)
    with pytest.raises(JobMismatch, match=r"mine/job\.json"):
        JobFolder(job).open("digest")


def test_a_place_that_is_no_folder_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="file"):
        JobFolder(make_job(tmp_path, tmp_path / "file", "mine")).open("digest")


def test_the_last_generation_is_the_highest_ever_decided(job: Job) -> None:
    first = opened(job)
    assert first.last_generation() == 0
    first.decide(mlflow_run_id="abc")
    assert first.last_generation() == 0
    for number in (1, 2, 3):
        first.decide(generation=number, step=10 * number)
    first.close()
    with (folder(job) / "journal.jsonl").open("a") as journal:
        journal.write('{"time":1,"generation":4')  # torn by a crash
    again = opened(job)
    assert again.last_generation() == 3
    again.decide(generation=4)
    assert again.last_generation() == 4
    assert [line.get("generation") for line in read(folder(job) / "journal.jsonl")] == [None, 1, 2, 3, 4]


def test_the_newest_mlflow_run_is_remembered(job: Job) -> None:
    first = opened(job)
    assert first.mlflow_run_id() is None
    first.decide(mlflow_run_id="one")
    first.decide(mlflow_run_id="two")
    first.decide(generation=1)
    assert opened(job).mlflow_run_id() == "two"


def test_roll_back_drops_the_later_steps_and_new_ones_follow(job: Job) -> None:
    first = opened(job)
    assert first.roll_back(0) == (0, {})
    for step in range(1, 8):
        first.steps.append({"step": step, "loss": 1.0 / step})
    assert first.roll_back(7) == (0, {"step": 7, "loss": 1 / 7})
    assert first.roll_back(9) == (0, {})
    assert first.roll_back(4) == (3, {"step": 4, "loss": 1 / 4})
    first.steps.append({"step": 5, "loss": 5.0})
    first.close()
    assert [(line["step"], line["loss"]) for line in read(folder(job) / "steps.jsonl")] == [
        (1, 1.0), (2, 1 / 2), (3, 1 / 3), (4, 1 / 4), (5, 5.0),
    ]  # fmt: skip


def test_roll_back_by_a_later_submission(job: Job) -> None:
    first = opened(job)
    for step in (1, 2, 3):
        first.steps.append({"step": step})
    again = opened(job)
    assert again.roll_back(0) == (3, {})
    assert read(folder(job) / "steps.jsonl") == []


def test_events_go_to_the_ledger_as_they_are_returned(job: Job) -> None:
    job_folder = opened(job)
    line = job_folder.record("host_lost", host=3, node="a")
    job_folder.flush()
    assert read(folder(job) / "ledger.jsonl") == [{"format_version": 1, **line}]
    assert line["event"] == "host_lost"
    assert line["host"] == 3
    assert line["time"] > 1e9
