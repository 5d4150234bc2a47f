"""Small jobs for tests of the controller: a tiny model on a tiny corpus, seconds per run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from elastic_train.config.job import Job
from elastic_train.config.load import parse_job
from elastic_train.data.corpus import open_corpus
from elastic_train.data.prepare import prepare

VOCABULARY = 300

JOB = """
name: {name}
seed: 1
model: {{hidden_size: 64, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2,
         intermediate_size: 128, vocab_size: 304}}
data: {{uri: '{data}', sequence_length: 32}}
training: {{steps: 30, global_batch: 8, micro_batch: 1}}
optimizer: {{learning_rate: 1e-3}}
schedule: {{warmup_steps: 5}}
parallel: {{pp: auto, dp_shard: auto}}
hosts: {{min: 1, max: 4, settle_seconds: 0.5, growth_margin: 0}}
storage: {{uri: '{storage}'}}
checkpoint: {{every_steps: 10}}
tracking: {{enabled: false}}
log: {{samples: true}}
"""


def make_corpus(folder: Path) -> Path:
    """A prepared data set of a few thousand tokens; returns its folder."""
    texts = folder / "texts"
    texts.mkdir(parents=True)
    for number in range(40):
        words = " ".join(str(number * 1000 + i * 7) for i in range(150))
        (texts / f"{number:02}.txt").write_text(f"document {number}: {words}\n")
    prepare(open_corpus(str(texts)), str(folder / "data"), VOCABULARY)
    return folder / "data"


def make_job(data: Path, storage: Path | str, name: str, *overrides: str) -> Job:
    return parse_job(JOB.format(name=name, data=data, storage=storage), list(overrides))


def assert_same_curve(
    lines: list[dict[str, Any]],
    reference: list[dict[str, Any]],
    tolerance: float = 1e-5,
    norm_tolerance: float | None = None,
) -> None:
    """Every step once, in order, with the reference's samples, loss and gradient norm. Tolerances are relative."""
    assert [line["step"] for line in lines] == [line["step"] for line in reference]
    for line, expected in zip(lines, reference, strict=True):
        for field in ("samples", "slots", "batch"):
            assert line.get(field) == expected[field], f"step {line['step']}: {field}"
        assert line["lr"] == expected["lr"]
        assert line["valid_tokens"] == expected["valid_tokens"]
        of_norm = tolerance if norm_tolerance is None else norm_tolerance
        for field, limit in (("loss", tolerance), ("grad_norm", of_norm)):
            assert math.isclose(line[field], expected[field], rel_tol=limit), f"step {line['step']}: {field}"
