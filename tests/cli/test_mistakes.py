"""CASES, theme 7: configuration and command-line mistakes, through the real command.

Exit code 2, every message on stderr, nothing printed as if it had worked, never a traceback.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elastic_train.cli.main import app
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
    ("PP-01", "parallel.pp=4 training.micro_batch=8 hosts.max=4", ["1 micro-batches per data rank", "fewer than pp=4"]),
    (
        "PP-04",
        "training.micro_batch=3",
        ["global_batch=8: must be a multiple of training.micro_batch=3; nearest: 6, 9"],
    ),
    ("PP-08", "model.num_hidden_layers=3 parallel.pp=4 hosts.max=4", ["num_hidden_layers=3 is smaller than pp=4"]),
    ("hosts", "parallel.pp=2 hosts.max=4", ["hosts.min=1", "at least 2 hosts are needed"]),
    ("several", "training.micro_batch=-1 lr=3 parallel.tp=x", ["training.micro_batch=-1", "lr:", "parallel.tp=x"]),
    ("no override", "training.steps 5", ["'training.steps' is not an override; write section.key=value"]),
]


@pytest.mark.parametrize("verb", ["validate", pytest.param("train", marks=pytest.mark.slow)])
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


TWO = "hosts.min=2 hosts.max=2"
SENSELESS = [
    ("training.precision=fp16", "training.precision=fp16: must be 'fp32' or 'bf16' or 'fp8'"),
    ("training.precision=fp8", "training.precision=fp8: needs hosts.device=cuda"),
    ("training.reduce_dtype=bf16", "reduce_dtype=bf16 needs precision=bf16 or fp8"),
    ("training.recompute=true", "training.recompute=true: must be 'none' or 'selective' or 'full'"),
    ("training.compile=1", "training.compile=1: must be true or false"),
    ("training.determinism=strict", "must be 'default' or 'exact'"),
    ("training.determinism=exact training.compile=true", "compile=true is not available with determinism=exact"),
    ("training.ema_decay=1", "training.ema_decay=1: must be a number greater than 0 and below 1 or null"),
    ("training.ema_decay=0", "training.ema_decay=0: must be a number greater than 0"),
    ("training.ema_decay=.nan", "training.ema_decay=NaN: must be a number"),
    ("training.global_tokens=0", "training.global_tokens=0: must be an integer of at least 1"),
    ("training.global_tokens=500", "8 x 32; nearest: 480, 512"),
    ("parallel.data=zero4", "parallel.data=zero4: must be 'ddp' or 'zero1' or 'zero2' or 'zero3' or 'hsdp'"),
    ("parallel.data=ddp parallel.dp_shard=2", "dp_shard=2 must be 1 with data=ddp"),
    ("parallel.data=zero2 parallel.reshard_after_forward=true", "reshard_after_forward=true needs data=zero3 or hsdp"),
    ("parallel.data=ddp parallel.prefetch=0", "prefetch=0 needs data=zero3 or hsdp, not ddp"),
    ("parallel.prefetch=-1", "parallel.prefetch=-1: must be an integer of at least 0"),
    ("parallel.offload=true", "parallel.offload=true: needs hosts.device=cuda"),
    ("parallel.pipeline=dualpipe", "must be 'gpipe' or '1f1b' or 'interleaved_1f1b' or 'zero_bubble' or 'zbv'"),
    ("parallel.virtual_stages=0", "parallel.virtual_stages=0: must be an integer of at least 1"),
    ("parallel.virtual_stages=3", "virtual_stages=3 is not used by pipeline=1f1b"),
    ("parallel.pipeline=interleaved_1f1b parallel.virtual_stages=1", "interleaves nothing; use pipeline=1f1b"),
    ("parallel.pipeline=zbv parallel.virtual_stages=3", "virtual_stages=3 must be 2 with pipeline=zbv"),
    (
        f"parallel.pipeline=interleaved_1f1b parallel.virtual_stages=1000000000 parallel.pp=2 {TWO}",
        "num_hidden_layers=4 is smaller than pp=2 x 1000000000",
    ),
    (f"parallel.pipeline=zero_bubble training.recompute=full parallel.pp=2 {TWO}", "recompute=full is not available"),
    (
        f"parallel.pipeline=zero_bubble training.determinism=exact parallel.pp=2 {TWO}",
        "not available with determinism=exact",
    ),
    (f"parallel.pipeline=zbv model.tie_word_embeddings=true parallel.pp=2 {TWO}", "tie_word_embeddings=true is not"),
    ("parallel.cp=3", "sequence_length=32 is not divisible by 2 x cp=6"),
    ("parallel.cp=1000000000", "sequence_length=32 is not divisible by 2 x cp=2000000000"),
    ("parallel.context=ulysses parallel.cp=4", "num_key_value_heads=2 is not divisible by tp x cp=4"),
    ("model.vocab_size=9 model.num_key_value_heads=4 parallel.tp=4 data.uri=x", "vocab_size=9 over tp=4 is 3 tokens"),
    ("optimizer.name=adafactor", "optimizer.name=adafactor: must be 'adamw' or 'adam' or 'sgd' or 'lion' or 'muon'"),
    ("optimizer.momentum=0.9", "momentum is not used by name=adamw"),
    ("optimizer.name=lion optimizer.eps=1e-8", "eps is not used by name=lion"),
    ("optimizer.name=sgd optimizer.momentum=1", "optimizer.momentum=1: must be a number of at least 0 and below 1"),
    ("optimizer.weight_decay=1e9", "times optimizer.learning_rate=0.0003 must be below 1"),
    ("optimizer.learning_rate=true", "optimizer.learning_rate=true: must be a number"),
    ("schedule.name=wsd schedule.decay_steps=200", "schedule.decay_steps=200: must be at most training.steps"),
    ("schedule.decay_steps=5", "decay_steps=5 is for name=wsd"),
    ("schedule.name=constant schedule.min_lr=1e-5", "min_lr=1e-05 is not reached with name=constant"),
    ("evaluation.every_steps=0", "evaluation.every_steps=0: must be an integer of at least 1"),
    ("evaluation.samples=-3", "evaluation.samples=-3: must be an integer of at least 1"),
    ("evaluation.uri=3", "evaluation.uri=3: must be text or null"),
    ("data.document_mask=1", "data.document_mask=1: must be true or false"),
    ("init_from=3", "init_from=3: must be text or null"),
    ("init_from=''", "the storage URI is empty; give a local path, file:// or s3://bucket/prefix"),
    ("init_from=.", "has no config.json; give the folder of a Hugging Face model"),
    ("init_from=s3://nobody/model", "s3://nobody/model/config.json: no credentials; set AWS_ACCESS_KEY_ID"),
    ("init_from=gs://nobody/model", "unknown scheme 'gs'; accepted are a local path, file:// and s3://bucket/prefix"),
    ("parallel.pp=2 hosts.min=1000000000 hosts.max=1 parallel.tp=auto", "max=1 is smaller than min=1000000000"),
]


@pytest.mark.parametrize(("overrides", "sentence"), SENSELESS, ids=[case[0] for case in SENSELESS])
def test_senseless_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: str, sentence: str) -> None:
    """In this process: a command of its own takes a second each."""
    monkeypatch.chdir(tmp_path)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    Path("job.yaml").write_text(GOOD)
    result = CliRunner().invoke(app, ["validate", "job.yaml", *overrides.split()])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert all(line.startswith("error: ") for line in result.stderr.splitlines())
    assert sentence in result.stderr


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
        (["data", "prepare", "--corpus", "nowhere"], "input 'nowhere' is not there"),
        (["checkpoint", "ls", "nobody"], "no job folder runs/nobody"),
        (["checkpoint", "verify", "nobody", "--storage", "gs://x"], "gs://x"),
        (["export-hf", "nobody"], "no job folder runs/nobody"),
        (["status", "nobody"], "no job folder runs/nobody"),
        (["stop", "nobody", "--address", "127.0.0.1:9"], "no Ray cluster answers at 127.0.0.1:9"),
        (["train", "job.yaml", "--address", "127.0.0.1:9"], "no Ray cluster answers at 127.0.0.1:9"),
        (["estimate", "job.yaml"], "No such command 'estimate'"),
        (["train", "job.yaml", "--dry"], "No such option"),
    ],
)
def test_user_error(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    (tmp_path / "job.yaml").write_text(GOOD)
    # An address, lest it looks for the cluster of another test.
    result = elastic_train(*arguments, cwd=tmp_path, RAY_ADDRESS="127.0.0.1:9")
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


def test_a_phase_that_never_begins_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no error: a trial of fewer steps is the same job."""
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(GOOD)
    sources = "data.sources=[{name: a, uri: x, weight: 1}, {name: b, uri: y, weight: 1}]"
    phases = ", ".join(f"{{from_step: {step}, weights: {{a: 1, b: 2}}}}" for step in (2, 20, 21))
    words = ["data.uri=null", sources, f"data.phases=[{phases}]", "training.steps=20"]
    result = CliRunner().invoke(app, ["validate", "job.yaml", *words])
    assert result.exit_code == 0, result.stderr
    reason = "it begins after the last step, training.steps=20"
    assert result.stderr == f"warning: the phase of data.phases from step 21 has no effect: {reason}\n"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("evaluation.uri=nowhere", "evaluation.uri={here}/nowhere: {here}/nowhere has no manifest.json"),
        ("evaluation.uri=data evaluation.samples=1000", "are fewer than evaluation.samples=1000"),
        ("data.document_mask=true", "data.document_mask=true: data.uri={here}/data holds 1 document: there is nothing"),
        (
            "data.exhausted=stop",
            "data.uri={here}/data: exhausted=stop, and its 32 samples end in step 5 of",
        ),
    ],
)
def test_data_that_does_not_fit_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(GOOD)
    Path("text").mkdir()
    Path("text/a.txt").write_text("".join(map(chr, range(97, 123))) * 40 + "\n")
    runner = CliRunner()
    made = runner.invoke(app, ["data", "prepare", "--corpus", "text", "--out", "data", "--vocab-size", "257"])
    assert made.exit_code == 0, made.stderr
    for verb in ("validate", "train"):
        result = runner.invoke(app, [verb, "job.yaml", "model.vocab_size=257", *overrides.split()])
        if verb == "train" or "has no manifest" not in sentence:
            assert result.exit_code == 2
            assert sentence.format(here=tmp_path) in result.stderr
        else:  # it may be prepared later
            assert result.exit_code == 0
            assert f"# data not checked: {sentence.format(here=tmp_path)}" in result.stdout
    assert not Path("runs").exists(), "something was started"
