from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.config.errors import ConfigError
from elastic_train.config.job import Job
from elastic_train.config.load import load_job, parse_job
from tests.config.job_files import GOOD


def problems(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_job(text, overrides, source="job.yaml")
    return list(caught.value.problems)


def test_a_good_file_and_its_defaults() -> None:
    job = parse_job(GOOD)
    assert (job.name, job.seed, job.training.slots) == ("good", 1, 8)
    assert job.optimizer.betas == (0.9, 0.95)
    assert job.parallel.dp_shard == "auto"


def test_overrides_are_yaml_values_and_apply_in_order() -> None:
    job = parse_job(
        GOOD,
        [
            "optimizer.learning_rate=1e-4",
            "optimizer.betas=[0.8, 0.9]",
            "optimizer.clip_norm=null",
            "parallel.dp_shard=2",
            "training.steps=7",
            "training.steps=1_000",
            "data.uri=s3://bucket/a=b",
        ],
    )
    assert job.optimizer.learning_rate == 1e-4
    assert job.optimizer.betas == (0.8, 0.9)
    assert job.optimizer.clip_norm is None
    assert job.parallel.dp_shard == 2
    assert job.training.steps == 1000
    assert job.data.uri == "s3://bucket/a=b"


def test_keys_beside_the_preset_win() -> None:
    job = parse_job(GOOD, ["model.preset=llama3-8b", "model.num_hidden_layers=2", "model.rope_scaling.factor=32.0"])
    assert (job.model.hidden_size, job.model.num_hidden_layers) == (4096, 2)
    assert job.model.rope_scaling is not None
    assert (job.model.rope_scaling.factor, job.model.rope_scaling.low_freq_factor) == (32.0, 1.0)


def test_the_resolved_job_is_a_job_file() -> None:
    job = parse_job(GOOD)
    assert Job.model_validate(job.as_dict(), strict=False) == job


UNKNOWN_KEYS = [
    ("optimizer.learning_rte=1e-4", "optimizer.learning_rte: unknown key; did you mean optimizer.learning_rate?"),
    ("learning_rate=1e-4", "learning_rate: belongs under optimizer: optimizer.learning_rate"),
    ("num-epochs=3", "num-epochs: unknown key; use training.steps"),
    ("training.num_train_epochs=3", "training.num_train_epochs: unknown key; use training.steps"),
    (
        "training.gradient_accumulation_steps=4",
        "gradient_accumulation_steps is derived from training.global_batch, training.micro_batch and the data ranks",
    ),
    ("optimizer.steps=3", "optimizer.steps: belongs under training: training.steps"),
    ("model.seed=3", "model.seed: belongs at the top level: seed"),
    ("optimizer.schedule=3", "optimizer.schedule: belongs at the top level: schedule"),
    ("training.global-batch=3", "training.global-batch: unknown key; did you mean training.global_batch?"),
    ("lerning_rate=1", "lerning_rate: unknown key; did you mean optimizer.learning_rate?"),
    (
        "parallel.zz=3",
        "parallel.zz: unknown key; accepted under parallel: data, pp, dp_replicate, dp_shard, cp, tp, pipeline",
    ),
    ("zzz=3", "zzz: unknown key; accepted at the top level: name, seed, init_from, model"),
    ("parallel.tensor_parallel_size=2", "use parallel.tp"),
    ("batch_size=2", "use training.global_batch"),
    ("lora.r=8", "lora.r: unknown key; use lora.rank"),
    ("lora_alpha=8", "lora_alpha: unknown key; use lora.alpha"),
    ("lora.dropout=0.1", "dropout is not available: what it leaves out would depend on the layout"),
]


@pytest.mark.parametrize(("override", "sentence"), UNKNOWN_KEYS)
def test_unknown_key(override: str, sentence: str) -> None:
    (problem,) = problems(GOOD, override)
    assert sentence in problem


WRONG_VALUES = [
    ("training.micro_batch=-1", "training.micro_batch=-1: must be an integer of at least 1"),
    ("training.micro_batch=0", "training.micro_batch=0: must be an integer of at least 1"),
    ("training.steps=1.5", "training.steps=1.5: must be an integer of at least 1"),
    ("training.steps=many", "training.steps=many: must be an integer of at least 1"),
    ("data.sequence_length=0", "data.sequence_length=0: must be an integer of at least 1"),
    ("checkpoint.keep_last=0", "checkpoint.keep_last=0: must be an integer of at least 1"),
    ("parallel.tp=0", "parallel.tp=0: must be an integer of at least 1 or 'auto'"),
    ("parallel.pp=all", "parallel.pp=all: must be an integer of at least 1 or 'auto'"),
    ("hosts.device=gpu", "hosts.device=gpu: must be 'cpu' or 'cuda'"),
    ("log.samples=yes", "log.samples=yes: must be true or false"),
    ("log.samples=1", "log.samples=1: must be true or false"),
    ("seed=-1", "seed=-1: must be an integer of at least 0 and below 4294967296"),
    ("optimizer.learning_rate=0", "optimizer.learning_rate=0: must be a number greater than 0"),
    ("optimizer.learning_rate=.inf", "optimizer.learning_rate=Infinity: must be a number greater than 0"),
    ("optimizer.eps=.nan", "optimizer.eps=NaN: must be a number greater than 0"),
    ("optimizer.betas=[0.9]", "optimizer.betas=[0.9]: must be a list of 2 values"),
    ("optimizer.betas=[0.9, 1.0]", "each a number of at least 0 and below 1"),
    ("optimizer=3", "optimizer=3: must be a mapping with the keys name, learning_rate"),
    ("data=null", "data=null: must be a mapping with the keys uri, exhausted, sources, phases, sequence_length"),
    ("name=a b", "name=a b: use 1 to 63 letters"),
    ("name=3", "name=3: must be text"),
    ("model.hidden_size=66", "model: hidden_size=66 is not a multiple of num_attention_heads=4"),
    ("model.num_key_value_heads=3", "model: num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
    ("hosts.min=3", "hosts: max=1 is smaller than min=3"),
    ("model.preset=llama-8b", "model.preset=llama-8b: must be one of tiny, llama3-8b, llama3-70b, llama3-405b"),
    ("model=tiny", "model=tiny: write model: {preset: tiny}"),
    ("schedule.warmup_steps=200", "schedule.warmup_steps=200: must be at most training.steps=100"),
    ("schedule.min_lr=0.01", "schedule.min_lr=0.01: must be at most optimizer.learning_rate=0.0003"),
    ("data.sequence_length=9000", "data.sequence_length=9000: must be at most model.max_position_embeddings=8192"),
    ("tracking.uri=./mlruns", "tracking.uri=./mlruns: must start with"),
    ("lora={}", "lora: needs init_from, the model that it adapts"),
    ("lora=true", "lora=true: must be a mapping with the keys rank, alpha, target_modules or null"),
    ("lora.rank=0", "lora.rank=0: must be an integer of at least 1"),
    ("lora.alpha=.nan", "lora.alpha=NaN: must be a number greater than 0"),
    ("lora.target_modules=[query]", "lora.target_modules=[\"query\"]: must be a list, each 'q_proj' or 'k_proj' or"),
    ("lora.target_modules=all", "lora.target_modules=all: must be a list, each"),
    ("lora.target_modules=[]", "lora.target_modules=[]: is empty; give some of q_proj, k_proj"),
    ("lora.target_modules=[q_proj, q_proj]", "has q_proj twice"),
    ("training.steps", "override 'training.steps': write section.key=value"),
    ("=3", "override '=3': write section.key=value"),
    ("name.first=3", "override 'name.first=3': name is 'good', a value and not a section"),
    ("data.uri=[", "override 'data.uri=[': line 1, column 2"),
]


@pytest.mark.parametrize(("override", "sentence"), WRONG_VALUES)
def test_wrong_value(override: str, sentence: str) -> None:
    (problem,) = problems(GOOD, override)
    assert sentence in problem


def test_adapters_with_what_they_do_not_go_with() -> None:
    given = problems(
        GOOD, "init_from=x", "lora={}", "optimizer.name=muon", "training.precision=fp8", "hosts.device=cuda"
    )
    assert [sentence.partition(": is")[0] for sentence in given] == [
        "optimizer.name=muon",
        "training.precision=fp8",
    ]
    assert all("is not available with lora" in sentence for sentence in given)


def test_batch_that_does_not_divide_names_the_nearest() -> None:
    (problem,) = problems(GOOD, "training.global_batch=30", "training.micro_batch=4", "parallel.dp_shard=4")
    assert problem.startswith("training.global_batch=30: must be a multiple of training.micro_batch=4; nearest: 28, 32")
    assert "4 data ranks" in problem
    assert problem.endswith("= 16: 16, 32")


def test_all_problems_are_told_at_once() -> None:
    mistakes = {"optimizer.learning_rte": "1", "training.steps": "0", "parallel.tp": "x", "name": "-", "lr": "3"}
    found = problems(GOOD, "nonsense", *(f"{key}={value}" for key, value in mistakes.items()))
    assert len(found) == 6
    for key in ("nonsense", *mistakes):
        assert any(key in problem for problem in found), key


def test_missing_sections_are_named() -> None:
    found = problems("name: x\ntraining: {global_batch: 8}\n")
    assert any(problem.startswith("model: is required") for problem in found)
    assert any(problem.startswith("data: is required") for problem in found)
    assert any(problem.startswith("training.steps: is required: an integer of at least 1") for problem in found)


BAD_FILES = [
    ("", "job.yaml: is empty"),
    ("# only a comment\n", "job.yaml: is empty"),
    ("- a\n- b\n", "job.yaml: holds a list; a job file is a mapping with the keys name"),
    ("just text", "job.yaml: holds text"),
    ("name: x\nmodel: {preset: tiny\ndata: 3\n", "job.yaml: line 3, column 5"),
    ("a: b: c", "job.yaml: line 1, column 5"),
    ("name: x\n\tseed: 3\n", "job.yaml: line 2, column 1: a tab is used for indentation"),
    ("name: x\nseed: 1\nname: y\n", "job.yaml: line 3, column 1: the key 'name' appears twice"),
    ("training:\n  steps: 1\n  steps: 2\n", "job.yaml: line 3, column 3: the key 'steps' appears twice"),
    ("1: x\n", "job.yaml: line 1, column 1: the key 1 is not text"),
    ("name: !!python/object/apply:os.getcwd []\n", "job.yaml: line 1, column 7: could not determine a constructor"),
]


@pytest.mark.parametrize(("text", "sentence"), BAD_FILES)
def test_bad_file(text: str, sentence: str) -> None:
    assert sentence in problems(text)[0]


def test_paths_that_are_no_job_file(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"name: \xff\xfe")
    for path, sentence in (
        (tmp_path / "absent.yaml", "absent.yaml: no such file"),
        (tmp_path, "is a folder"),
        (binary, "byte 6 is not UTF-8"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            load_job(path)


def test_scalars_mean_what_people_mean() -> None:
    text = GOOD.replace("name: good", "name: no").replace("steps: 100", "steps: 0100")
    job = parse_job(text, ["optimizer.learning_rate=3e-4", "schedule.min_lr=1E-05"])
    assert job.name == "no"
    assert job.training.steps == 100
    assert (job.optimizer.learning_rate, job.schedule.min_lr) == (3e-4, 1e-5)


def test_what_is_said_once_can_be_merged_into_other_places() -> None:
    job = parse_job(GOOD + "schedule: &once {warmup_steps: 5, name: constant}\n")
    merged = parse_job(GOOD + "schedule: {<<: {warmup_steps: 7, name: constant}, warmup_steps: 5}\n")
    assert merged == job


def test_a_budget_in_tokens_is_a_batch() -> None:
    text = GOOD.replace("  global_batch: 8\n", "")
    assert parse_job(text, ["training.global_tokens=512"]).training.global_batch == 512 // 32
    both = parse_job(GOOD, ["training.global_tokens=256"])
    assert (both.training.global_batch, both.training.global_tokens) == (8, 256)
    assert Job.model_validate(both.as_dict(), strict=False) == both


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["training.global_tokens=500"], "15 x 32; nearest: 480, 512"),
        (["training.global_tokens=20"], "1 x 32; nearest: 32"),
        (["training.global_tokens=528", "training.micro_batch=4"], "16 x 32; nearest: 512, 640"),
        (["training.global_tokens=512", "training.global_batch=8"], "8 x 32; nearest: 512"),
    ],
)
def test_a_budget_in_tokens_that_does_not_fit(overrides: list[str], sentence: str) -> None:
    (problem,) = problems(GOOD.replace("  global_batch: 8\n", ""), *overrides)
    assert problem.startswith(f"{overrides[0]}: must be training.global_batch x data.sequence_length = {sentence}")


def test_a_job_without_any_batch_names_both_keys() -> None:
    (problem,) = problems(GOOD.replace("  global_batch: 8\n", ""))
    assert problem.startswith("training.global_batch: is required: an integer of at least 1")
    assert "or give global_tokens" in problem


def test_exact_refuses_what_it_cannot_keep_exact() -> None:
    (problem,) = problems(GOOD, "training.determinism=exact", "training.compile=true")
    assert problem == "training: compile=true is not available with determinism=exact; use false"
    overrides = ["training.determinism=exact", "training.precision=bf16", "training.reduce_dtype=bf16"]
    (problem,) = problems(GOOD, *overrides)
    assert "reduce_dtype=bf16 is not available with determinism=exact; use fp32" in problem


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("parallel.prefetch=3", "prefetch=3 needs data=zero3 or hsdp, not zero1"),
        ("parallel.offload=true", "offload=true needs data=zero3 or hsdp, not zero1"),
        ("parallel.reshard_after_forward=true", "reshard_after_forward=true needs data=zero3 or hsdp, not zero1"),
    ],
)
def test_knobs_of_zero3_are_refused_elsewhere(override: str, sentence: str) -> None:
    (problem,) = problems(GOOD, "parallel.data=zero1", override)
    assert sentence in problem


MIXTURE = """\
name: mixed
model: {preset: tiny}
data:
  sources:
    - {name: code, uri: data/code, weight: 3}
    - {name: prose, uri: s3://bucket/prose, weight: 1.5, exhausted: stop}
  phases:
    - {from_step: 50, weights: {code: 1, prose: 1}}
  sequence_length: 32
training: {steps: 100, global_batch: 8}
"""


def test_a_mixture() -> None:
    data = parse_job(MIXTURE).data
    assert [(source.name, source.weight, source.exhausted) for source in data.all_sources] == [
        ("code", 3.0, "repeat"),
        ("prose", 1.5, "stop"),
    ]
    assert data.phases[0].weights == {"code": 1.0, "prose": 1.0}
    assert data.first_uri == "data/code"


def test_one_data_set_is_a_source() -> None:
    (source,) = parse_job(GOOD, ["data.exhausted=stop"]).data.all_sources
    assert (source.uri, source.exhausted) == ("data", "stop")


def test_the_default_of_tails_is_that_of_the_packing() -> None:
    given = {"stream": "drop", "documents": "keep", "none": "keep"}
    assert {packing: parse_job(GOOD, [f"data.packing={packing}"]).data.tail_policy for packing in given} == given
    assert parse_job(GOOD, ["data.packing=none", "data.tails=drop"]).data.tail_policy == "drop"
    assert parse_job(GOOD, ["data.packing=documents"]).data.separates_documents


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("data.uri=x", "data: give uri for one data set, or sources for a mixture of several"),
        ("data.sources=[]", "data: give uri for one data set, or sources for a mixture of several"),
        ("data.exhausted=stop", "data: exhausted=stop belongs to the sources here"),
        ("data.sources=[{name: code, uri: a, weight: -1}]", "data.sources.0.weight=-1: must be a number of at least 0"),
        ("data.sources=[{name: code, uri: a}]", "data.sources.0.weight: is required: a number of at least 0"),
        (
            "data.sources=[{name: code, uri: a, weight: 1}, {name: b, uri: b, weight: 1, wieght: 2}]",
            "data.sources.1.wieght: unknown key; did you mean data.sources.1.weight?",
        ),
        ("data.sources=[{name: code, uri: a, weight: 1}, 7]", "data.sources.1=7: must be a mapping with the keys name"),
        ("data.sources=7", "data.sources=7: must be a list, each a mapping with the keys name, uri"),
        ("data.sources=[{name: code, uri: a, weight: 0}]", "data: the weights of the sources are all 0"),
        (
            "data.sources=[{name: code, uri: a, weight: 1}, {name: code, uri: b, weight: 1}]",
            "data: sources have the name 'code' twice",
        ),
        (
            "data.phases=[{from_step: 9, weights: {code: 1}}]",
            "data: the phase from step 9 gives weights to ['code']; the sources are ['code', 'prose']",
        ),
        (
            "data.phases=[{from_step: 1, weights: {code: 1, prose: 1}}]",
            "data.phases.0.from_step=1: must be an integer of at least 2",
        ),
        (
            "data.phases=[{from_step: 2, weights: {code: 1, prose: -1}}]",
            'data.phases.0.weights={"code": 1, "prose": -1}: must be a mapping of text to a number of at least 0',
        ),
        (
            "data.phases=[{from_step: 9, weights: {code: 0, prose: 0}}]",
            "data: the phase from step 9 has no weight above 0",
        ),
        (
            "data.phases=[{from_step: 9, weights: {code: 1, prose: 1}}, {from_step: 9, weights: {code: 1, prose: 1}}]",
            "data: phases begin at steps [9, 9], which must rise",
        ),
        ("data.cache_size=lots", "data.cache_size=lots: must be a size such as 80GiB"),
        ("data.cache_size=60MiB", "data.cache_size=60MiB: must be at least 64MiB"),
    ],
)
def test_a_mixture_that_is_none(override: str, sentence: str) -> None:
    (problem,) = problems(MIXTURE, override)
    assert problem.startswith(sentence)
    assert "\n" not in problem


def test_phases_without_sources() -> None:
    (problem,) = problems(GOOD, "data.phases=[{from_step: 9, weights: {}}]")
    assert problem == "data: phases change the weights of sources, and there are none"
