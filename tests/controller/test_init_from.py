"""A whole job that starts from a Hugging Face folder: coordinator, two hosts, checkpoints, export."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from elastic_train.checkpoint.hf_export import export_hf
from elastic_train.config.errors import ConfigError
from elastic_train.config.job import Job
from elastic_train.controller.coordinator import Coordinator
from elastic_train.controller.job_folder import job_store
from elastic_train.controller.resumption import begin_from_source, open_data
from elastic_train.data.batches import StepBatches
from elastic_train.data.dataset import TokenDataset
from elastic_train.data.manifest import read_manifest
from elastic_train.data.order import SampleOrder
from elastic_train.model.hf_folder import open_hf_folder
from elastic_train.storage.store import Store
from tests.hf_models import hf_loss, load_hf, save_hf
from tests.jobs import make_corpus, make_job
from tests.local_job import LocalJob

pytest.importorskip("transformers")


def job_of(tmp_path: Path, source: Path, *overrides: str) -> Job:
    model = open_hf_folder(str(source)).model.model_dump(mode="json")
    section = [f"model.{key}={yaml.safe_dump(value, default_flow_style=True)}" for key, value in model.items()]
    section = [line.removesuffix("\n").removesuffix("\n...") for line in section]
    return make_job(
        make_corpus(tmp_path / "corpus"),
        tmp_path / "runs",
        "imported",
        f"init_from={source}",
        *section,
        "training.steps=3",
        "schedule.warmup_steps=0",
        "checkpoint.every_steps=1",
        "hosts.min=2",
        "hosts.max=2",
        *overrides,
    )


def loss_of(folder: Path, job: Job, step: int) -> float:
    """What transformers makes of the samples of ``step`` with the weights in ``folder``."""
    dataset = TokenDataset.open(job.data.uri, job.data.sequence_length, job.storage)
    batches = StepBatches(dataset, SampleOrder(len(dataset), job.seed), job.training)
    return hf_loss(load_hf(folder), [batches.slot(step, index) for index in range(job.training.slots)])


@pytest.mark.slow
def test_a_job_starts_from_a_folder_and_its_checkpoints_go_back_into_one(tmp_path: Path) -> None:
    source = save_hf(tmp_path / "source", "Qwen2", torch.bfloat16, vocab_size=304)
    job = job_of(tmp_path, source, "parallel.tp=2", "parallel.dp_shard=1", "parallel.pp=1")
    with LocalJob(job) as local:
        local.start_hosts("aa")  # tensor ranks share a node
        assert local.finish()["state"] == "finished", local.status()
        lines = local.lines("steps")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[0]["loss"] == pytest.approx(loss_of(source, job, 1), rel=1e-5)
    store = job_store(job)
    for step in (1, 2):
        out = export_hf(store, step, store, tmp_path / f"out{step}", dtype="float32")
        assert lines[step]["loss"] == pytest.approx(loss_of(out, job, step + 1), rel=1e-5)
    out = export_hf(store, 3, store, tmp_path / "out")
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()
    # Once there is a checkpoint the source may be gone.
    shutil.rmtree(source)
    with LocalJob(job) as local:
        assert local.finish()["state"] == "finished"


def test_a_source_that_does_not_fit_is_found_before_any_host_starts(tmp_path: Path) -> None:
    source = save_hf(tmp_path / "source", vocab_size=304)
    job = job_of(tmp_path, source, "model.rope_theta=7.0")
    with pytest.raises(ConfigError, match=r"model\.rope_theta=7\.0: the config\.json of init_from has 10000\.0"):
        asyncio.run(Coordinator(job, "127.0.0.1", "token", lambda event: None).start())
    assert not (tmp_path / "runs/imported/hf").exists()


def test_data_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    source = save_hf(tmp_path / "source", vocab_size=304)
    job = job_of(tmp_path, source)
    tokenizer = Path(job.data.uri, read_manifest(Store.open(job.data.uri))[0].tokenizer.path).read_bytes()
    (source / "tokenizer.json").write_bytes(tokenizer + b" ")
    with pytest.raises(ConfigError, match=r"is not the tokenizer\.json of init_from=.* --tokenizer "):
        asyncio.run(Coordinator(job, "127.0.0.1", "token", lambda event: None).start())
    (source / "tokenizer.json").write_bytes(tokenizer)
    begin_from_source(job, open_data(job), job_store(job))
    assert (tmp_path / "runs/imported/hf/tokenizer.json").read_bytes() == tokenizer


def test_the_identity_of_a_job_holds_what_it_started_from(tmp_path: Path) -> None:
    source = save_hf(tmp_path / "source", vocab_size=304)
    job = job_of(tmp_path, source)

    async def start_and_close() -> None:
        coordinator = Coordinator(job, "127.0.0.1", "token", lambda event: None)
        await coordinator.start()
        await coordinator.close()

    asyncio.run(start_and_close())
    folder = tmp_path / "runs/imported"
    assert json.loads((folder / "job.json").read_text())["identity"]["init_from"] == str(source)
    kept = json.loads((folder / "hf/source.json").read_text())
    assert kept["uri"] == str(source)
    assert set(kept["dtypes"].values()) == {"F32"}
    assert (folder / "hf/config.json").read_bytes() == (source / "config.json").read_bytes()
