"""CASES, theme 7: configuration and command-line mistakes, through the real command.

Exit code 2, every message on stderr, nothing printed as if it had worked, never a traceback.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.command import elastic_train
from tests.config.job_files import GOOD

HEADS = "model.hidden_size=640 model.num_attention_heads=40 model.num_key_value_heads=40 parallel.tp=3"

CASES = [
    (
        "CF-01 unknown",
        "optimizer.learning_rte=1e-4",
        ["optimizer.learning_rte: unknown key", "optimizer.learning_rate"],
    ),
    ("CF-01 misplaced", "learning_rate=1e-4", ["learning_rate: belongs under optimizer: optimizer.learning_rate"]),
    ("CF-01 epochs", "num-epochs=3", ["num-epochs", "use training.steps"]),
    ("CF-03", "training.global_batch=30 training.micro_batch=4 parallel.dp_shard=4", ["=30:", "16: 16, 32", "28, 32"]),
    (
        "CF-05 heads",
        HEADS,
        [
            "num_attention_heads=40 is not divisible by tp=3",
            "num_key_value_heads=40 is not divisible by tp=3",
            "intermediate_size=128 is not divisible by tp=3",
            "sequence_length=32 is not divisible by tp=3",
        ],
    ),
    (
        "CF-05 kv heads",
        "model.vocab_size=250682 model.intermediate_size=129 parallel.tp=8",
        [
            "num_attention_heads=4 is not divisible by tp=8",
            "num_key_value_heads=2 is not divisible by tp=8",
            "intermediate_size=129 is not divisible by tp=8",
        ],
    ),
    ("CF-08 accumulation", "training.gradient_accumulation_steps=0", ["is derived from training.global_batch"]),
    ("CF-08 micro-batch", "training.micro_batch=-1", ["training.micro_batch=-1: must be an integer of at least 1"]),
    ("CF-08 warmup", "schedule.warmup_steps=200", ["schedule.warmup_steps=200: must be at most training.steps=100"]),
    ("CF-08 keep_last", "checkpoint.keep_last=0", ["checkpoint.keep_last=0: must be an integer of at least 1"]),
    ("CF-08 sequence", "data.sequence_length=0", ["data.sequence_length=0: must be an integer of at least 1"]),
    ("HF-08", "parallel.tp=4 hosts.max=4", ["num_key_value_heads=2 is not divisible by tp=4"]),
    ("PP-08", "model.num_hidden_layers=3 parallel.pp=4 hosts.max=4", ["num_hidden_layers=3 is smaller than pp=4"]),
    ("hosts", "parallel.pp=2 hosts.max=4", ["hosts.min=1", "at least 2 hosts are needed"]),
    ("several", "training.micro_batch=-1 lr=3 parallel.tp=x", ["training.micro_batch=-1", "lr:", "parallel.tp=x"]),
    ("no override", "training.steps 5", ["'training.steps' is not an override; write section.key=value"]),
]


@pytest.mark.parametrize("verb", ["validate", "train"])
@pytest.mark.parametrize(("overrides", "sentences"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_mistake(tmp_path: Path, verb: str, overrides: str, sentences: list[str]) -> None:
    (tmp_path / "job.yaml").write_text(GOOD)
    result = elastic_train(verb, "job.yaml", *overrides.split(), cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert all(line.startswith("error: ") for line in result.stderr.splitlines())
    for sentence in sentences:
        assert sentence in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"], "something was started"


BAD_FILES = [
    ("name: x\n  seed: 3\n", r"job.yaml: line 2, column \d+"),
    ("name: x\nname: y\n", r"job.yaml: line 2, column 1: the key 'name' appears twice"),
    ("", r"job.yaml: is empty"),
    ("[1, 2]\n", r"job.yaml: holds a list; a job file is a mapping"),
    ("optimizer: {learning_rte: 1e-4}\n", r"did you mean optimizer.learning_rate\?"),
]


@pytest.mark.parametrize(("text", "pattern"), BAD_FILES)
def test_bad_file(tmp_path: Path, text: str, pattern: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    result = elastic_train("validate", "job.yaml", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert re.search(pattern, result.stderr)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["validate", "absent.yaml"], "absent.yaml: no such file"),
        (["validate"], "no job file: give its path first"),
        (["train", "training.steps=3"], "no job file: give its path first"),
        (["train", "job.yaml"], "has no manifest.json; prepare the data set with `elastic-train data prepare`"),
        (["submit", "/job.yaml"], "/job.yaml: no such file"),
        (["data", "inspect", "nowhere"], "nowhere has no manifest.json"),
        (["data", "prepare", "--corpus", "nowhere"], "corpus 'nowhere' is not there"),
        (["checkpoint", "ls", "nobody"], "no job folder runs/nobody"),
        (["checkpoint", "verify", "nobody", "--storage", "gs://x"], "gs://x"),
        (["export-hf", "nobody"], "no job folder runs/nobody"),
        (["status", "nobody"], "no job folder runs/nobody"),
        (["stop", "nobody", "--address", "127.0.0.1:9"], "no Ray cluster answers at 127.0.0.1:9"),
        (["train", "job.yaml", "--address", "127.0.0.1:9"], "no Ray cluster answers at 127.0.0.1:9"),
        (["plan", "job.yaml"], "No such command 'plan'"),
        (["train", "job.yaml", "--dry"], "No such option"),
    ],
)
def test_user_error(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    (tmp_path / "job.yaml").write_text(GOOD)
    result = elastic_train(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_submit_without_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(GOOD)
    result = elastic_train("submit", "job.yaml", "--address", "http://127.0.0.1:9", cwd=tmp_path)
    assert result.returncode == 2
    assert "no Ray job server at http://127.0.0.1:9" in result.stderr
    assert "Traceback" not in result.stderr


def test_too_little_data(tmp_path: Path) -> None:
    """DA-05: 3 sequences for a global batch of 8; and a vocabulary larger than the model's."""
    (tmp_path / "job.yaml").write_text(GOOD)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("".join(map(chr, range(97, 123))) * 4 + "\n")
    made = elastic_train("data", "prepare", "--corpus", "text", "--out", "data", "--vocab-size", "257", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    result = elastic_train("train", "job.yaml", cwd=tmp_path)
    assert result.returncode == 2
    assert "3 sequences of 32 tokens are fewer than training.global_batch=8" in result.stderr
    assert "model.vocab_size=256: must be at least 257" in result.stderr
