"""``elastic-train plan``: CASES of theme 1 that a person would check from outside, and every option."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from elastic_train.cli.main import app
from elastic_train.config.load import load_job
from elastic_train.planner.layouts import check_job, choose_layout
from tests.cli.command import elastic_train

LLAMA_70B = ("--model", "llama3-70b", "--gpus", "64", "--gpu", "h100-80gb", "--seq", "8192", "--global-batch", "1024")
LLAMA_8B = ("--model", "llama3-8b", "--gpus", "8")
NARROW = ("parallel.pp=4", "parallel.tp=8", "parallel.cp=1")
ONE_AXIS = ("parallel.tp=1", "parallel.pp=1", "parallel.cp=1")
HF = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
LLAMA_7B = HF | {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
BAICHUAN_13B = HF | {
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "intermediate_size": 13696,
    "vocab_size": 125696,
    "max_position_embeddings": 4096,
}
QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}


def answer(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 0, result.stderr or result.output
    return result.stdout


def document(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer(*arguments, "--json"))
    return found


def refused(*arguments: str) -> str:
    """The one sentence of a question that has no answer."""
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def config(folder: Path, values: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return str(path)


def mib(text: str) -> int:
    return int(text) * 2**20


def test_a_model_on_gpus_is_ranked_with_reasons() -> None:
    text = answer(*LLAMA_70B)
    assert text.startswith("llama3-70b: 70,553,706,496 parameters; 1,024 sequences of 8,192 tokens a step")
    header = text.splitlines()[text.splitlines().index("") + 1].split("\t")
    assert header[:5] == ["#", "layout", "GPUs", "options", "memory"]
    rows = [line.split("\t") for line in text.splitlines() if re.match(r"\d+\t", line)]
    assert [row[0] for row in rows] == [str(number) for number in range(1, 9)]
    seconds = [float(row[header.index("s/step")]) for row in rows]
    assert seconds == sorted(seconds)
    assert all(0.2 < float(row[header.index("MFU causal")]) < 0.8 for row in rows)
    assert re.search(r"^#1 .*: of its step backward \d+%, forward \d+%", text, re.MULTILINE)
    assert re.search(
        r"^\d[\d,]* layouts? ruled out by memory; nearest: .* needs [\d.]+ GiB of 79.11 GiB", text, re.MULTILINE
    )
    assert "largest tp of this model: 8" in text


def test_json_has_every_term_of_every_rank() -> None:
    found = document(*LLAMA_70B, "parallel.pp=4", "--tokens", "1.4T", "--price", "2.5")
    first = found["layouts"][0]
    assert first["layout"]["pp"] == len(first["memory"]) == 4
    for rank in first["memory"]:
        assert sum(rank["terms_bytes"].values()) == rank["total_bytes"] <= found["memory_limit_bytes"]
    assert sum(first["terms_seconds"].values()) == pytest.approx(first["step_seconds"])
    assert first["tokens_per_second"] == pytest.approx(1024 * 8192 / first["step_seconds"])
    assert first["days"] == pytest.approx(1.4e12 / first["tokens_per_second"] / 86400)
    assert first["cost"] == pytest.approx(first["days"] * 24 * first["ranks"] * 2.5)
    assert {entry["limit"] for entry in found["rejected"]} >= {"num_attention_heads", "slower"}


def test_mem_01_the_textbook_names_its_bytes_per_parameter(tmp_path: Path) -> None:
    text = answer("--params", "6738415616", "--ranks", "8")
    for strategy, formula, gib in (("ddp", "16P", 100.41), ("zero2", "2P + 14P/N", 23.53), ("zero3", "16P/N", 12.55)):
        row = next(line.split("\t") for line in text.splitlines() if line.startswith(f"{strategy}\t"))
        assert row[1] == formula
        assert float(row[-1]) / 2**30 == pytest.approx(gib, abs=0.005)
    found = document("--model", config(tmp_path, LLAMA_7B), "--gpus", "8", "--gpu", "a100-80gb", *ONE_AXIS,
                     "parallel.data=zero3")  # fmt: skip
    assert found["parameters"] == 6_738_415_616
    state = found["layouts"][0]["model_state_bytes"]
    textbook, engine = state.values()
    assert textbook / 2**30 == pytest.approx(12.55, abs=0.005)
    assert engine == pytest.approx(textbook, rel=0.02)


def test_mem_02_zero2_of_13b_needs_eight_and_zero3_four(tmp_path: Path) -> None:
    machine = ("--gpu", "a100-80gb", "--gpu-memory", "79.35GiB", "--seq", "1536", "--global-batch", "64")
    fixed = (*ONE_AXIS, "training.micro_batch=1", "training.recompute=none", "training.reduce_dtype=bf16")
    asked = ("--model", config(tmp_path, BAICHUAN_13B), *machine, *fixed)
    message = refused(*asked, "--gpus", "4", "parallel.data=zero2")
    assert "needs" in message and "of 79.35 GiB; its biggest term is" in message
    (smallest,) = re.findall(r"smallest number that would do is (\d+)", message)
    assert 4 < int(smallest) <= 8
    eight = document(*asked, "--gpus", "8", "parallel.data=zero2")["layouts"][0]
    (textbook, _) = eight["model_state_bytes"].values()
    assert textbook / 2**30 == pytest.approx(48.5, abs=0.1)
    four = document(*asked, "--gpus", "4", "parallel.data=zero3")["layouts"][0]
    (textbook, _) = four["model_state_bytes"].values()
    assert textbook / 2**30 == pytest.approx(51.8, abs=0.1)


def test_mem_05_logits_decide(tmp_path: Path) -> None:
    asked = ("--model", config(tmp_path, QWEN_7B), "--gpus", "8", "--gpu", "h100-80gb", "--seq", "16384",
             "--global-batch", "64", "parallel.tp=1", "parallel.pp=1", "parallel.data=zero3",
             "training.recompute=full")  # fmt: skip

    def logits(*more: str) -> int:
        terms: dict[str, int] = document(*asked, *more)["layouts"][0]["memory"][0]["terms_bytes"]
        assert max(terms, key=lambda term: terms[term]) == "logits and loss"
        return terms["logits and loss"]

    one = logits("training.micro_batch=1", "parallel.cp=1")
    assert 23.2 <= one / 2**30 <= 30
    message = refused(*asked, "training.micro_batch=4", "parallel.cp=1")
    assert "its biggest term is logits and loss" in message
    assert "on 8 GPUs it fits with training.micro_batch=1 or parallel.cp=4 or parallel.tp=2" in message
    assert logits("training.micro_batch=2", "parallel.cp=2") == pytest.approx(one)


def test_mem_07_state_is_cut_by_the_ranks_and_activations_are_not(tmp_path: Path) -> None:
    """6.19e9 parameters; the estimators of the case count the state alone, and 2 ranks hold no less than 13 GB."""
    model = config(tmp_path, LLAMA_7B | {"num_hidden_layers": 28, "vocab_size": 64000})
    held = {}
    for ranks in (2, 4, 8):
        question = ("--model", model, "--gpus", str(ranks), "--gpu", "h200", *ONE_AXIS, "parallel.data=zero3",
                    f"parallel.dp_shard={ranks}", "parallel.reshard_after_forward=true", "training.micro_batch=1",
                    "training.recompute=none", "--seq", "2048", "--global-batch", "64")  # fmt: skip
        found = document(*question, "training.reduce_dtype=bf16")
        assert found["parameters"] == pytest.approx(6.19e9, rel=0.01)
        (held[ranks],) = (layout["memory"][0] for layout in found["layouts"])
    states = {ranks: sum(rank["state_bytes"].values()) for ranks, rank in held.items()}
    assert states[2] == pytest.approx(16 * found["parameters"] / 2, rel=0.01)
    assert [states[2] / states[ranks] for ranks in (4, 8)] == pytest.approx([2, 4], rel=0.01)
    for term in ("activations of blocks", "other activations", "logits and loss"):
        assert len({rank["terms_bytes"].get(term) for rank in held.values()}) == 1, term


def test_mem_08_a_tied_embedding_counts_once_and_is_on_both_ends(tmp_path: Path) -> None:
    tied = HF | {
        "tie_word_embeddings": True,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    question = ("--model", config(tmp_path, tied), "--gpus", "2", "--gpu", "h100-80gb", "--seq", "2048",
                "--global-batch", "16", "parallel.tp=1", "parallel.cp=1", "parallel.data=ddp",
                "parallel.pipeline=1f1b")  # fmt: skip
    one, two = (document(*question, f"parallel.pp={size}", "parallel.dp_replicate=1") for size in (1, 2))
    assert one["parameters"] == two["parameters"] == 1_235_814_400
    (whole,), ends = one["layouts"][0]["memory"], two["layouts"][0]["memory"]
    together = sum(rank["state_bytes"]["weights"] for rank in ends)
    assert whole["state_bytes"]["weights"] == 2 * 1_235_814_400
    assert together == 2 * (1_235_814_400 + 262_668_288)
    assert all(rank["state_bytes"]["weights"] > 2 * 262_668_288 for rank in ends)
    # The head multiplies, whether it is tied or not: 6 x all, and nothing for the embedding, which is that matrix.
    assert one["flops_per_token"]["full"] == two["flops_per_token"]["full"] > 6 * 1_235_000_000


def test_mem_10_the_first_stage_keeps_most_micro_batches(tmp_path: Path) -> None:
    """8 stages of equal layers and 8 micro-batches; the vocabulary is so small that layers are split evenly."""
    model = config(tmp_path, LLAMA_7B | {"vocab_size": 1024})
    question = ("--model", model, "--gpus", "8", "--gpu", "h200", "--seq", "4096", "--global-batch", "8",
                "parallel.pp=8", "parallel.tp=1", "parallel.cp=1", "parallel.dp_replicate=1", "parallel.dp_shard=1",
                "parallel.data=ddp", "training.micro_batch=1", "training.recompute=none")  # fmt: skip

    def activations(pipeline: str) -> list[int]:
        (layout,) = document(*question, f"parallel.pipeline={pipeline}")["layouts"]
        ranks = layout["memory"]
        # The one whose memory decides; with gpipe the last one, which has the logits.
        fullest = max(range(8), key=lambda number: int(ranks[number]["total_bytes"]))
        assert fullest == (0 if pipeline == "1f1b" else 7)
        return [rank["terms_bytes"]["activations of blocks"] for rank in ranks]

    last = activations("1f1b")[-1]
    assert activations("1f1b") == [count * last for count in range(8, 0, -1)]
    assert activations("gpipe") == [8 * last] * 8
    text = answer(*question, "parallel.pipeline=1f1b", "--per-stage")
    (row,) = [line.split("\t") for line in text.splitlines() if line.startswith("activations of blocks\t")]
    assert int(row[1]) == 8 * int(row[-1])


def test_mem_13_selective_recomputation_saves_little_with_a_fused_kernel(tmp_path: Path) -> None:
    model = config(tmp_path, LLAMA_7B | {"vocab_size": 1024})
    kept = {}
    for kind in ("none", "selective", "full"):
        (layout,) = document(
            "--model", model, "--gpus", "1", "--gpu", "mi300x", "--seq", "4096", "--global-batch", "1", *ONE_AXIS,
            "training.micro_batch=1", f"training.recompute={kind}", "parallel.dp_shard=1",
        )["layouts"]  # fmt: skip
        kept[kind] = layout["memory"][0]["terms_bytes"]["activations of blocks"]
    assert kept["selective"] < kept["none"] < 1.1 * kept["selective"]
    assert kept["full"] == 32 * 32 * 2**20 <= kept["none"] / 8


def test_mem_12_units_of_memory_are_honoured(tmp_path: Path) -> None:
    asked = (*LLAMA_70B, *NARROW, "--gpu-memory")
    for size, shown in (("80GB", "74.51"), ("80GiB", "80.00"), ("81559MiB", "79.65")):
        assert f"{shown} GiB each" in answer(*asked, size)
    assert "--gpu-memory 80e9: must be a size such as 80GiB" in refused(*asked, "80e9")


def test_mem_12_a_job_of_77_gib_fits_only_where_there_are_as_many() -> None:
    asked = ("--model", "llama3-8b", "--gpus", "8", *ONE_AXIS, "parallel.data=zero1", "training.micro_batch=1",
             "training.recompute=full")  # fmt: skip

    def gib(length: int) -> float:
        (rank,) = document(*asked, "--gpu-memory", "1TiB", "--seq", str(length))["layouts"][0]["memory"]
        return float(rank["total_bytes"] / 2**30)

    length = next(length for length in range(4096, 32768, 512) if gib(length) > 74.6)
    asked, needed = (*asked, "--seq", str(length)), gib(length)
    assert needed < 79.6
    assert f"needs {needed:.2f} GiB of 74.51 GiB" in refused(*asked, "--gpu-memory", "80GB")
    for size in ("80GiB", "81559MiB"):
        assert document(*asked, "--gpu-memory", size)["layouts"]


TINY = ("--model", "tiny", "--gpus", "8")
IMPOSSIBLE = [
    (
        ("--model", "llama3-8b", "--gpus", "0"),
        r"--gpus 0: must be at least 1; the smallest number that would do is \d+",
    ),
    ((*TINY, "parallel.tp=8"), r"num_attention_heads=4 is not divisible by tp=8.*nearest: parallel.tp=2"),
    (
        (*LLAMA_70B, "parallel.tp=16", "model.num_key_value_heads=64"),
        r"tp=16 is more than the 8 h100-80gb of a node.*nearest: parallel.tp=8",
    ),
    (
        ("--model", "llama3-405b", "--gpus", "8"),
        r"8 GPUs cannot hold it: .*biggest term is .*; the smallest number that would do is \d+",
    ),
    (
        (*LLAMA_8B, "parallel.cp=3"),
        r"length=8192 is not divisible by 2 x cp=6.*nearest: parallel.cp=2 or data.sequence_length=8190",
    ),
    ((*LLAMA_8B, "--gpu", "h1000"), r"'h1000' is not known; nearest: h100-80gb"),
    (("--model", "llama3-7b", "--gpus", "8"), r"--model llama3-7b: must be one of tiny.*did you mean llama3-70?8?b"),
    ((*LLAMA_8B, "parallel.pp=16"), r"pp=16 needs 16 GPUs, and there are 8; the smallest number that would do is \d+"),
    ((*LLAMA_8B, "parallel.pp=99"), r"num_hidden_layers=32 is smaller than pp=99; nearest: parallel.pp=32"),
    (
        (*TINY, "parallel.dp_shard=16", "--global-batch", "8"),
        r"16 data ranks .* exceed the 8 slots.*nearest: parallel.dp_shard=8 or training.global_batch=16$",
    ),
    ((*TINY, "parallel.tp=5", "parallel.pp=9"), r"nearest: parallel.tp=2 with parallel.pp=\d$"),
    ((*TINY, "parallel.tp=100000000"), r"nearest: parallel.tp=2$"),
    (
        ("--model", "tiny", "--gpus", "1000000000000"),
        r"--gpus 1000000000000: no layout is looked for on more than 1,048,576 accelerators",
    ),
    ((*TINY, "parallel.cp=100000000"), r"nearest: parallel.cp=4096$"),
    ((*TINY, "parallel.tp=100000000", "parallel.pp=100000000"), r"nearest: parallel.tp=2 with parallel.pp=\d$"),
    (
        ("--model", "llama3-405b", "--gpus", "8", "--gpu-memory", "1GiB"),
        r"8 GPUs cannot hold it: .*; no number up to 1,048,576 would do$",
    ),
    (("--params", "7e9", "--traffic"), r"--traffic is for a job file or --model"),
    ((*LLAMA_8B, "--gpu", "a100-80gb", "training.precision=fp8"), r"a100-80gb has no fp8 units"),
    (("--model", "llama3-8b"), r"--gpus: how many accelerators"),
    ((), r"nothing to plan: give a job file"),
    (("--params", "many"), r"--params many: must be a number above 0"),
    (("--params", "7e9", "--ranks", "0"), r"--ranks 0: must be at least 1"),
    (("--params", "7e9", "--strategy", "zero4"), r"--strategy zero4: must be one of ddp"),
    (("--params", "7e9", "--gpus", "8"), r"--params asks without a model"),
    ((*LLAMA_8B, "--strategy", "zero3"), r"--strategy zero3 is for --params"),
    ((*LLAMA_8B, "--price", "cheap"), r"--price cheap: must be a number"),
    (
        (*LLAMA_8B, *ONE_AXIS, "parallel.dp_shard=8", "parallel.dp_replicate=1", "--show", "9"),
        r"--show 9: 1 layout is there",
    ),
    ((*LLAMA_8B, "stray"), r"--model llama3-8b and the job file stray: give one"),
    ((*LLAMA_8B, "--calibrate", "nowhere/at-all"), r"no job folder"),
    ((*LLAMA_8B, "--seq", "0"), r"--seq 0: must be at least 1"),
    ((*LLAMA_8B, "--global-batch", "0"), r"--global-batch 0: must be at least 1"),
    ((*LLAMA_8B, "--gpu-memory", "0GiB"), r"--gpu-memory 0GiB: must be more than 0"),
    ((*LLAMA_8B, "--gpu", ""), r"accelerator '' is not known"),
    ((*LLAMA_8B, "--price", "nan"), r"--price nan: must be 0 or more"),
    ((*LLAMA_8B, "--price", "-1"), r"--price -1: must be 0 or more"),
    ((*LLAMA_8B, "--html", "no/such/x.html"), r"--html no/such/x.html: there is no folder no/such"),
    ((*LLAMA_8B, "--html", "/"), r"--html /: is a folder"),
    ((*LLAMA_8B, "--write-job", "no/w.yaml"), r"--write-job no/w.yaml: there is no folder no"),
    ((*LLAMA_70B, *NARROW, "--pipeline-picture", "no/w.svg"), r"--pipeline-picture no/w.svg: there is no folder no"),
    ((*LLAMA_8B, "--html", f"{'x' * 300}/x.html"), r"--html x+/x.html: (File name too long|there is no folder)"),
    (("--params", "7e9", "--price", "2"), r"--price is for a job file or --model"),
    (("--params", "7e9", "--html", "x.html"), r"--html is for a job file or --model"),
    (("--params", "7e9", "--gpu", "h200"), r"--gpu is for a job file or --model"),
    (("--params", "7e9", "--top", "2"), r"--top is for a job file or --model"),
    (("--params", "7e9", "--show", "1"), r"--show is for a job file or --model"),
]


@pytest.mark.parametrize(("arguments", "sentence"), IMPOSSIBLE)
def test_an_impossible_question_gets_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    message = refused(*arguments)
    assert re.search(sentence, message), message
    if smallest := re.search(r"smallest number that would do is (\d+)", message):
        possible = [*arguments]
        possible[possible.index("--gpus") + 1] = smallest[1]
        assert document(*possible)["layouts"]


def test_nothing_is_written_when_something_cannot_be(tmp_path: Path) -> None:
    job = tmp_path / "w.yaml"
    for arguments in (("--pipeline-picture", "w.gif"), ("--pipeline-picture", str(tmp_path / "w.svg"))):
        assert refused(*LLAMA_8B, "parallel.pp=1", "--write-job", str(job), *arguments)
        assert not job.exists()


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"rope_theta": "x"}, "rope_theta='x': must be a number"),
        ({"rope_scaling": [1]}, r"rope_scaling=\[1\]: must be an object"),
        ({"architectures": 5}, "architectures=5: must be one of Llama"),
        ({"model_type": ["llama"]}, r"model_type=\['llama'\]: must be a name"),
        ({"hidden_size": "many"}, "hidden_size='many'"),
    ],
)
def test_a_config_json_with_a_wrong_value_gets_a_sentence(
    tmp_path: Path, values: dict[str, Any], sentence: str
) -> None:
    assert re.search(sentence, refused("--model", config(tmp_path, LLAMA_7B | values), "--gpus", "8"))


def test_a_config_json_without_end_gets_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[" * 100_000)
    assert "cannot be read as JSON" in refused("--model", str(path), "--gpus", "8")


def test_a_window_that_is_left_out_is_told(tmp_path: Path) -> None:
    values = LLAMA_7B | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 2048}
    asked = ("--model", config(tmp_path, values), "--gpus", "8", *ONE_AXIS)
    assert any("sliding_window=2,048" in sentence for sentence in document(*asked, "--seq", "4096")["assumed"])
    assert not any("sliding_window" in sentence for sentence in document(*asked, "--seq", "2048")["assumed"])


def test_what_barely_fits_is_tight() -> None:
    asked = (*LLAMA_8B, *ONE_AXIS, "--global-batch", "64", "training.micro_batch=1", "training.recompute=full",
             "parallel.data=zero3", "parallel.reshard_after_forward=true")  # fmt: skip
    (rank,) = document(*asked)["layouts"][0]["memory"]
    for room, expected in ((1.04, True), (1.07, False)):
        row, *_ = document(*asked, "--gpu-memory", f"{rank['total_bytes'] * room / 2**20:.0f}MiB")["layouts"]
        assert row["memory"][0]["total_bytes"] == rank["total_bytes"]
        assert any(reason.startswith("tight: 96.") for reason in row["reasons"]) == expected


def test_a_layer_that_no_number_of_gpus_can_hold(tmp_path: Path) -> None:
    """A block of 12.9e9 parameters and its gradient are 144 GiB with gradients in float32: no tp cuts it."""
    wide = LLAMA_7B | {"hidden_size": 32768, "num_attention_heads": 256, "intermediate_size": 87040, "vocab_size": 512}
    sentence = refused("--model", config(tmp_path, wide), "--gpus", "64", "--gpu", "h100-80gb", *ONE_AXIS)
    assert re.match(r"error: 64 GPUs cannot hold it: .* needs [\d.,]+ GiB of 79.11 GiB; its biggest term is", sentence)
    assert sentence.endswith("; no number up to 1,048,576 would do")


OFFLOADED = ("--model", "llama3-70b", "--gpus", "8", "parallel.data=zero3", "parallel.offload=true", "parallel.tp=1")


def test_offloaded_state_fits_the_memory_of_a_node() -> None:
    """70.6e9 parameters are 16 bytes each and more in CPU memory: weights and gradients are pinned."""
    found = document(*OFFLOADED)
    first = found["layouts"][0]
    assert found["host_memory_limit_bytes"] == 2 * 2**40
    (rank,) = first["memory"]
    assert rank["host_total_bytes"] == sum(rank["host_terms_bytes"].values())
    assert 16 * 70.55e9 < 8 * rank["host_total_bytes"] == first["host_bytes_per_node"] < 2 * 2**40
    assert "host_memory_bytes" in found["accelerator"]["sources"]
    text = answer(*OFFLOADED, "--per-stage")
    assert "offloaded state: 2,048 GiB of CPU memory on a node are its limit" in text
    assert re.search(
        r"^CPU memory of a node: 1,[\d.,]+ GiB; of the fullest rank master weights, pinned", text, re.MULTILINE
    )


def test_offloaded_state_that_no_node_can_hold_is_refused() -> None:
    sentence = refused(*OFFLOADED, "--host-memory", "1TiB")
    assert re.search(
        r"8 GPUs cannot hold it: dp_shard8 with parallel.offload=true needs 1,[\d.]+ GiB of CPU memory on a node "
        r"\(8 ranks of [\d.]+ GiB\), and a node of h100-80gb has 1,024.00 GiB; "
        r".*the smallest number that would do is 1\d$",
        sentence,
    ), sentence
    assert document(*OFFLOADED, "--gpus", "64", "--host-memory", "1TiB")["layouts"]
    assert document("--model", "llama3-8b", "--gpus", "8", *OFFLOADED[4:], "--host-memory", "1TiB")["layouts"]


def test_memory_of_a_node_that_nobody_stated_is_told(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    speeds = "memory_bytes_per_second: 2.0e12\nlink_bytes_per_second: 3.0e11\nnetwork_bytes_per_second: 2.5e10\n"
    mine.write_text(f"name: mine\nmemory_bytes: 85899345920\npeak_flops: {{bf16: 4.0e14}}\nper_node: 8\n{speeds}")
    question = ("--model", "llama3-8b", "--gpus", "8", *OFFLOADED[4:], "--gpu", str(mine))
    assert "--host-memory 1,024.00 GiB of CPU memory on a node of mine" in answer(*question)
    assert "--host-memory" not in answer(*question, "--host-memory", "2TiB")
    mine.write_text(f"{mine.read_text()}host_memory_bytes: 1000000\n")
    assert "a node of mine has 0.00 GiB" in refused(*question)
    assert "--host-memory 80: " in refused(*question, "--host-memory", "80")


def test_what_is_exchanged_is_listed_by_axis() -> None:
    asked = (*LLAMA_70B, *NARROW)
    first = document(*asked)["layouts"][0]
    assert {entry["axis"] for entry in first["traffic"]} >= {"tp", "pp", "shard", "world"}
    for entry in first["traffic"]:
        assert entry["sent_bytes"] > 0
        assert entry["seconds"] > 0
    assert set(first["model_state_bytes"]) == {"textbook", "engine"}
    assert re.fullmatch(r"[^,]+, P = parameters / \(tp x pp\), N = \d+", first["model_state_formula"])
    text = answer(*asked, "--traffic")
    lines = text[text.index("exchanges of ") :].splitlines()
    assert lines[1].split("\t") == ["axis", "what", "collective", "times", "sent", "seconds", "beside"]
    assert len(lines) == 2 + len(first["traffic"])


def test_80_columns_are_enough() -> None:
    environment = {"FORCE_COLOR": "1", "COLUMNS": "80", "TERM": "dumb"}
    text = CliRunner().invoke(app, ["plan", *LLAMA_70B, "--price", "2"], env=environment).stdout
    plain = re.sub("\x1b\\[[0-9;]*m", "", text)
    header = next(line for line in plain.splitlines() if line.startswith("#  "))
    assert "options" not in header
    assert {"s/step", "tokens/s", "MFU", "days", "cost"} <= set(header.split())
    (row,) = (line for line in plain.splitlines() if re.match(r"1 +\S", line))
    assert re.search(r"GiB +[\d.]+ +[\d,]+ +[\d.]+% +[\d.]+ +[\d,]+ *$", row), row
    assert len(re.findall(r"^#1 ", plain, re.MULTILINE)) == 2


def test_a_job_file_as_it_is_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: asked\nmodel: {preset: llama3-8b}\ndata: {uri: d, sequence_length: 8192}\n"
        "training: {steps: 10, global_batch: 64, precision: bf16}\nhosts: {max: 8, device: cuda}\n"
    )
    found = document(str(path), "--gpu", "h200")["as_the_file_is"]
    assert re.match(
        r"as the file is, train runs dp_shard8 \(data=zero3, reshard_after_forward=false, micro_batch=", found
    )
    assert re.search(r"[\d.]+ s a step, ([\d.]+% slower than|no slower than) #1$", found)
    assert found in answer(str(path), "--gpu", "h200")
    small = document(str(path))["as_the_file_is"]
    assert re.match(r"as the file is: 8 hosts cannot run this job: .* MiB a host; they have 81,008.6 MiB; none", small)
    assert document(*LLAMA_8B, *ONE_AXIS)["as_the_file_is"] is None


def test_a_job_file_as_it_is_has_its_own_number_of_hosts(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    text = (
        "name: asked\nmodel: {preset: tiny}\ndata: {uri: d, sequence_length: 512}\n"
        "training: {steps: 10, global_batch: 64}\nhosts: {max: MOST}\n"
    )
    path.write_text(text.replace("MOST", "2"))
    assert "train runs dp_shard2 (" in document(str(path), "--gpus", "8")["as_the_file_is"]
    path.write_text(text.replace("MOST", "1000000000000"))
    assert "hosts.max=1000000000000: no layout" in refused(str(path))
    assert "train runs dp_shard8 (" in document(str(path), "--gpus", "8")["as_the_file_is"]


def test_the_kind_of_context_parallelism_is_shown() -> None:
    assert re.search(r", ulysses[,;]|, ulysses\s", answer("--model", "llama3-8b", "--gpus", "8", "parallel.cp=2"))


def test_gpus_that_stay_idle_are_paid_for() -> None:
    asked = ("--model", "llama3-8b", "--gpus", "9", *ONE_AXIS, "--global-batch", "8", "--tokens", "1B")
    first = document(*asked, "--price", "2")["layouts"][0]
    assert first["ranks"] < 9
    assert first["cost"] == pytest.approx(first["days"] * 24 * 9 * 2)
    text = answer(*asked)
    assert "1 GPU stays idle: of the layouts that the question allows none that uses more is faster" in text
    assert "1,000,000,000 tokens = 15,259 steps, on 9 accelerators that are paid for, idle or not" in text


def test_the_tokens_that_were_assumed_are_told() -> None:
    found = document(*LLAMA_8B, *ONE_AXIS, "--global-batch", "64")
    assert "--tokens 5.243e+08 (1,000 steps)" in found["assumed"]
    assert found["tokens"] == 64_000 * 8192


def test_without_a_model() -> None:
    found = json.loads(answer("--params", "70e9", "--ranks", "64", "--strategy", "zero3", "--json"))
    (state,) = found["per_rank"]
    assert [size / 1e9 for size in state["terms_bytes"].values()] == [2.1875, 2.1875, 13.125]
    assert state["total_bytes"] == 17.5e9
    text = answer("--params", "70B", "--ranks", "64", "--tokens", "1.4T", "--flops-per-second", "25P")
    assert "272.2 days" in text


def test_a_job_file_is_a_question(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: asked\nmodel: {preset: llama3-8b}\ndata: {uri: s3://b/d, sequence_length: 8192}\n"
        "training: {steps: 1000, global_batch: 512, precision: bf16}\nparallel: {tp: 4}\n"
        "hosts: {min: 16, max: 32, device: cuda, memory: 80GB}\n"
    )
    found = document(str(path), "parallel.pp=2")
    assert found["gpus"] == 32
    assert found["memory_limit_bytes"] == 80e9
    assert found["tokens"] == 1000 * 512 * 8192
    assert {(row["layout"]["tp"], row["layout"]["pp"]) for row in found["layouts"]} == {(4, 2)}
    assert document(str(path), "--gpus", "8", "--seq", "4096")["tokens_per_step"] == 512 * 4096


def test_a_written_job_is_accepted_and_runs_as_planned(tmp_path: Path) -> None:
    path = tmp_path / "planned.yaml"
    first = document(*LLAMA_70B, "--write-job", str(path))["layouts"][0]
    job = load_job(path)
    assert check_job(job) == []
    assert job.hosts.max == 64
    assert choose_layout(job, 64).layout.as_dict() == first["layout"]
    assert refused(*LLAMA_70B, "--write-job", str(path)) == f"error: {path} exists; give another file"


def test_prices_of_a_table(tmp_path: Path) -> None:
    table = tmp_path / "prices.yaml"
    table.write_text("currency: EUR\nper_hour: {h100-80gb: 2.5}\n")
    first = document(*LLAMA_70B, *NARROW, "--price", str(table))["layouts"][0]
    assert first["currency"] == "EUR"
    assert first["cost"] == pytest.approx(first["days"] * 24 * first["ranks"] * 2.5)
    for value in (".nan", ".inf", "-1"):
        table.write_text(f"per_hour: {{h100-80gb: {value}}}\n")
        assert "must be a number of 0 or more" in refused(*LLAMA_70B, *NARROW, "--price", str(table))
    table.write_text("per_hour: {h200: 3}\n")
    assert "per_hour.h100-80gb=None must be a number" in refused(*LLAMA_70B, *NARROW, "--price", str(table))


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "path", "use", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            assert self.open.pop() == tag


@pytest.mark.slow
def test_the_report_is_one_file_with_its_plots(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    answer(*LLAMA_8B, "parallel.pp=2", "--html", str(path))
    text = path.read_text()
    tags = Tags()
    tags.feed(text)
    names = [name for name, _ in tags.seen]
    assert names.count("svg") == 3
    assert names.count("table") == 3
    assert not {"script", "img", "link", "iframe"} & set(names)
    for name, attributes in tags.seen:
        for key in ("src", "href", "xlink:href"):
            assert (attributes.get(key) or "#").startswith("#"), (name, attributes)
    assert "<li>4 ruled out by num_attention_heads; for example: " in text


@pytest.mark.slow
def test_the_pipeline_is_drawn(tmp_path: Path) -> None:
    svg, png = tmp_path / "slots.svg", tmp_path / "slots.png"
    answer(*LLAMA_70B, *NARROW, "--pipeline-picture", str(svg))
    assert svg.read_text().count("<path") > 4 * 2 * 4
    answer(*LLAMA_70B, *NARROW, "--pipeline-picture", str(png))
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "has no pipeline" in refused(*LLAMA_8B, "parallel.pp=1", "--pipeline-picture", str(svg))
    assert "must end in .svg or .png" in refused(*LLAMA_70B, *NARROW, "--pipeline-picture", "slots.gif")


def test_memory_by_stage() -> None:
    text = answer(*LLAMA_70B, *NARROW, "--per-stage")
    table = text[text.index("memory of ") :].splitlines()
    heads = table[1].split("\t")
    assert heads[1:] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    rows = {line.split("\t")[0]: line.split("\t")[1:] for line in table[2:] if "\t" in line}
    assert rows.pop("stages") == ["0", "1", "2", "3"]
    for column in range(4):
        terms = [int(cells[column] or 0) for name, cells in rows.items() if name not in ("total", "limit")]
        assert sum(terms) == int(rows["total"][column]) <= int(rows["limit"][column])
    assert any(line.startswith("model state, textbook (") for line in table)


def test_a_finished_run_calibrates(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "measured"
    folder.mkdir(parents=True)
    job = tmp_path / "job.yaml"
    job.write_text(
        "name: measured\nmodel: {preset: tiny}\ndata: {uri: d, sequence_length: 32}\n"
        "training: {steps: 20, global_batch: 8}\nparallel: {data: zero3}\n"
    )
    record = {"format_version": 1, "identity": {"model": {}}, "config": load_job(job).as_dict()}
    (folder / "job.json").write_text(json.dumps(record))
    lines = [
        {"step": n, "generation": 1, "layout": "dp_shard4", "seconds": 2.0, "data_seconds": 0.0} for n in range(1, 11)
    ]
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "ledger.jsonl").write_text(json.dumps({"event": "time_account", "goodput": 0.875}) + "\n")
    asked = (str(job), "--gpus", "4", "--calibrate", str(folder), *ONE_AXIS)
    found = document(*asked, "training.micro_batch=1", "parallel.dp_shard=4")
    assert found["layouts"][0]["step_seconds"] == pytest.approx(2.0, rel=1e-3)
    assert any("goodput of that run: 87.5%" in line for line in found["calibration"])
    assert "it ran on cpu and the question is about cuda" in refused(*asked, "--gpu", "h100-80gb")
    for seconds, sentence in ((1e-6, "no speed of cpu explains its steps"), (1e6, "no speed of cpu explains")):
        text = "".join(json.dumps(line | {"seconds": seconds}) + "\n" for line in lines)
        (folder / "steps.jsonl").write_text(text)
        assert sentence in refused(*asked)
    changing = [
        line | {"layout": layout, "seconds": seconds, "generation": generation}
        for generation, (layout, seconds) in enumerate((("dp_shard4", 2.0), ("dp_shard2", 9.0), ("single", 1.0)))
        for line in lines
    ]
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changing))
    assert re.search("no speed of cpu|is still \\d+% off, more than 10%", refused(*asked))
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:4]))
    assert "let the job run longer" in refused(*asked)
    (folder / "job.json").unlink()
    assert "has no job.json" in refused(*asked)


def test_it_starts_without_torch_and_writes_only_json(tmp_path: Path) -> None:
    code = (
        "import sys; from elastic_train.cli.main import app\n"
        "try:\n    app(['plan', '--model', 'llama3-8b', '--gpus', '8', '--json'])\n"
        "finally:\n    print(*(m for m in ('torch', 'ray', 'mlflow', 'numpy', 'pyarrow', 'matplotlib', 'boto3') "
        "if m in sys.modules), file=sys.stderr)\n"
    )
    import subprocess
    import sys

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert result.stderr.strip() == ""
    assert json.loads(result.stdout)["gpus"] == 8


def test_the_command_as_a_process(tmp_path: Path) -> None:
    done = elastic_train("plan", "--model", "llama3-8b", "--gpus", "8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("llama3-8b: 8,030,261,248 parameters")


def test_the_documentation_has_every_option() -> None:
    text = (Path(__file__).parents[2] / "docs/planner.md").read_text()
    options = re.findall(r"^│ (--[a-z-]+)", CliRunner().invoke(app, ["plan", "--help"]).stdout, re.MULTILINE)
    assert len(options) > 20
    missing = [option for option in options if f"`{option}" not in text and option not in ("--help",)]
    assert missing == []
