"""Folders that are not whole (CASES HF-07): made with safetensors itself, without transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from elastic_train.config.errors import ConfigError
from elastic_train.config.hf import hf_shapes, model_from_hf
from elastic_train.model.hf_folder import open_hf_folder, open_source
from tests.training.synthetic import small_job

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 30,
    "rope_theta": 500000.0,
}
TENSORS = {name: torch.ones(shape) for name, shape in hf_shapes(model_from_hf(CONFIG)).items()}
FILES = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
INDEX = "model.safetensors.index.json"


def write(folder: Path, tensors: dict[str, torch.Tensor] = TENSORS, config: dict[str, Any] = CONFIG) -> Path:
    """A folder of a single file."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A whole folder of three files and an index."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    names = list(TENSORS)
    weight_map = {}
    for n, path in enumerate(FILES):
        held = names[n::3]
        save_file({name: TENSORS[name] for name in held}, tmp_path / path)
        weight_map.update(dict.fromkeys(held, path))
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return tmp_path


def problems(folder: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        open_hf_folder(str(folder))
    assert all(problem.startswith(f"{folder}: ") for problem in caught.value.problems)
    return [problem.removeprefix(f"{folder}: ") for problem in caught.value.problems]


def test_a_whole_folder_has_every_parameter_once(sharded: Path, tmp_path: Path) -> None:
    for folder in (open_hf_folder(str(sharded)), open_hf_folder(str(write(tmp_path / "single")))):
        assert list(folder.tensors) == list(TENSORS)
        assert folder.nbytes == 4 * folder.model.num_parameters
        assert folder.model.rope_theta == 500_000.0


def test_a_file_that_no_index_names_is_ignored(sharded: Path) -> None:  # HF-07
    save_file({"model.norm.weight": torch.zeros(3), "stray": torch.zeros(1)}, sharded / "consolidated.safetensors")
    (sharded / "broken.safetensors").write_bytes(b"")
    assert len(open_hf_folder(str(sharded)).tensors) == len(TENSORS)


def test_a_file_that_the_index_names_and_that_is_absent(sharded: Path) -> None:  # HF-07
    (sharded / FILES[1]).unlink()
    assert problems(sharded) == [f"{FILES[1]} is missing, which {INDEX} names"]


def test_tensors_that_are_not_where_the_index_places_them(sharded: Path) -> None:  # HF-07
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = FILES[0]
    home = next(path for n, path in enumerate(FILES) if "model.norm.weight" in list(TENSORS)[n::3])
    (sharded / INDEX).write_text(json.dumps(index))
    assert problems(sharded) == [
        f"{FILES[0]} lacks model.norm.weight, which {INDEX} places there",
        f"{home} holds model.norm.weight, which {INDEX} does not place there",
    ]


def test_missing_unknown_and_misshapen_tensors_are_listed_together(tmp_path: Path) -> None:
    tensors = dict(TENSORS)
    del tensors["lm_head.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors |= {"model.layers.0.self_attn.q_proj.bias": torch.zeros(16), "model.layers.2.mlp.x": torch.zeros(1)}
    tensors["model.norm.weight"] = torch.zeros(17)
    tensors["model.embed_tokens.weight"] = torch.zeros(30, 16, dtype=torch.float8_e4m3fn)
    assert problems(write(tmp_path, tensors)) == [
        "missing tensors: model.layers.1.mlp.up_proj.weight, lm_head.weight",
        "unknown tensors: model.layers.0.self_attn.q_proj.bias, model.layers.2.mlp.x",
        "wrong shapes: model.norm.weight has (17,), the model (16,)",
        "dtypes other than F32, BF16, F16: model.embed_tokens.weight is F8_E4M3",
    ]


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    buffers = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.zeros(2) for n in range(2)}
    assert list(open_hf_folder(str(write(tmp_path, TENSORS | buffers))).tensors) == list(TENSORS)


def test_a_tied_model_needs_no_head_and_may_have_one(tmp_path: Path) -> None:  # HF-03
    config = CONFIG | {"tie_word_embeddings": True}
    both = open_hf_folder(str(write(tmp_path, config=config)))
    assert both.tied_head is not None
    assert "lm_head.weight" not in both.tensors
    headless = {name: tensor for name, tensor in TENSORS.items() if name != "lm_head.weight"}
    assert open_hf_folder(str(write(tmp_path, headless, config))).tied_head is None


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has neither model.safetensors nor"),
    "an index too": (lambda folder: (folder / INDEX).write_text("{}"), "has both model.safetensors and"),
    "cut short": (cut_short, "ends at byte"),
    "empty": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "it has 0 bytes"),
    "a pickle": (lambda folder: (folder / "model.safetensors").write_bytes(b"\x80\x02" * 50), "its header should have"),
    "no header": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"\x02" + b"\0" * 7 + b"[]"),
        "its header cannot be read",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_no_model_folder_is_said_in_a_sentence(damage: str, tmp_path: Path) -> None:
    folder = write(tmp_path)
    act, expected = DAMAGES[damage]
    act(folder)
    (sentence,) = problems(folder)
    assert expected in sentence


def test_the_configuration_and_the_tensors_are_judged_together(sharded: Path) -> None:
    (sharded / "config.json").write_text(json.dumps(CONFIG | {"hidden_act": "gelu"}))
    (sharded / FILES[2]).unlink()
    assert problems(sharded) == [
        "config.json: hidden_act='gelu': only 'silu' is available",
        f"{FILES[2]} is missing, which {INDEX} names",
    ]


def test_a_job_must_have_the_model_of_its_source(tmp_path: Path) -> None:
    folder = write(tmp_path)
    right = CONFIG.keys() & {"hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "rope_theta"}
    shape = {key: CONFIG[key] for key in right} | {"num_attention_heads": 4, "num_key_value_heads": 2}
    extra = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "initializer_range": 0.5}
    job = small_job(model=shape | extra).model_copy(update={"init_from": str(folder)})
    assert open_source(job) is not None
    assert open_source(job.model_copy(update={"init_from": None})) is None
    other = job.model.model_copy(update={"rope_theta": 10_000.0, "vocab_size": 31, "tie_word_embeddings": True})
    with pytest.raises(ConfigError) as caught:
        open_source(job.model_copy(update={"model": other}))
    assert caught.value.problems == (
        "model.vocab_size=31: the config.json of init_from has 30",
        "model.rope_theta=10000.0: the config.json of init_from has 500000.0",
        "model.tie_word_embeddings=True: the config.json of init_from has False",
    )
