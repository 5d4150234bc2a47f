"""Writes what this release leaves behind, for tests of later ones: run it once, with the code of the release.

    PYTHONPATH=CHECKOUT python tests/upgrades/write_release.py tests/upgrades/release_X

``data`` is a data set, ``jobs/old`` the folder of a job that has done 6 of its steps, on two hosts, with a checkpoint
after the 3rd (pinned) and the 6th, and ``reference.jsonl`` has the lines of the whole 9 steps, done without a break.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from elastic_train.checkpoint.catalog import read_catalog
from elastic_train.checkpoint.pins import pin
from elastic_train.config.job import Job
from elastic_train.config.load import parse_job
from elastic_train.controller.job_folder import job_store
from elastic_train.data.corpus import open_corpus
from elastic_train.data.prepare import prepare
from tests.local_job import LocalJob

JOB = """
name: {name}
model: {{hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, intermediate_size: 32,
         vocab_size: 272, tie_word_embeddings: true}}
data: {{uri: '{folder}/data', sequence_length: 16}}
training: {{steps: 9, global_batch: 4}}
optimizer: {{learning_rate: 1e-2}}
schedule: {{name: constant}}
hosts: {{min: 1, max: 2}}
storage: {{uri: '{folder}/jobs'}}
checkpoint: {{every_steps: 3}}
tracking: {{enabled: false}}
log: {{samples: true}}
"""


def old_job(folder: Path, *overrides: str, name: str = "old") -> Job:
    return parse_job(JOB.format(name=name, folder=folder), list(overrides))


def run(job: Job, nodes: str) -> None:
    with LocalJob(job, run_id=job.name) as run:
        run.start_hosts(nodes)
        assert run.finish()["state"] == "finished"


def write_release(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        texts = Path(scratch)
        for number in range(8):
            (texts / f"{number}.txt").write_text(" ".join(str(number * 100 + i) for i in range(80)))
        prepare(open_corpus(str(texts)), str(folder / "data"), 272)
    run(old_job(folder, "hosts.max=1", name="reference"), "a")
    shutil.move(folder / "jobs" / "reference" / "steps.jsonl", folder / "reference.jsonl")
    shutil.rmtree(folder / "jobs" / "reference")
    job = old_job(folder, "training.steps=6", "hosts.min=2")
    run(job, "ab")
    store = job_store(job)
    pin(store, read_catalog(store).find(3), "kept for tests")


if __name__ == "__main__":
    write_release(Path(sys.argv[1]).absolute())
