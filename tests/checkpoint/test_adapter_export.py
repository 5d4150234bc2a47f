"""Adapters of a checkpoint: merged into the weights by their formula, and alone under PEFT's names."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from elastic_train.checkpoint.adapter_export import export_adapter
from elastic_train.checkpoint.catalog import commit
from elastic_train.checkpoint.errors import CheckpointError, RestoreError
from elastic_train.checkpoint.hf_export import export_hf
from elastic_train.checkpoint.hf_source import keep_source
from elastic_train.config.hf import hf_shapes
from elastic_train.config.lora import LoraConfig
from elastic_train.config.model import ModelConfig
from elastic_train.model.hf_folder import open_hf_folder
from elastic_train.storage.store import Store
from tests.checkpoint.states import first_claim, random_layout, save
from tests.hf_folders import write_hf

MODEL = ModelConfig(
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    vocab_size=99,
    head_dim=12,
    qkv_bias=True,
)
LORA = LoraConfig(rank=3, alpha=6.0, target_modules=("v_proj", "down_proj"))
ADAPTED = [f"model.layers.{n}.{name}" for n in (0, 1) for name in ("self_attn.v_proj", "mlp.down_proj")]


def state(frozen: torch.dtype) -> dict[str, Tensor]:
    """Of a job with adapters and their averages; other numbers in each."""
    generator = torch.Generator().manual_seed(4)
    shapes = hf_shapes(MODEL)
    full = {f"param.{name}": torch.randn(shape, generator=generator).to(frozen) for name, shape in shapes.items()}
    for module in ADAPTED:
        rows, columns = shapes[f"{module}.weight"]
        for part, shape in (("lora_A", (3, columns)), ("lora_B", (rows, 3))):
            for kind in ("param", "exp_avg", "exp_avg_sq", "ema"):
                full[f"{kind}.{module}.{part}.weight"] = torch.randn(shape, generator=generator)
    return full


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """The folder of a job that began with a bfloat16 model."""
    store = Store.open(str(tmp_path / "job"))
    keep_source(open_hf_folder(str(write_hf(tmp_path / "source", MODEL, "BF16"))), store)
    return store


def committed(store: Store, folder: Path, full: dict[str, Tensor], seed: int = 1) -> None:
    layout = random_layout(full, random.Random(seed))
    manifest = save(store, folder, layout, 7, model=MODEL.model_dump(mode="json"))
    assert commit(store, manifest, first_claim(store)).created


@pytest.mark.parametrize("frozen", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["param", "ema"])
def test_merged_weights_are_w_plus_alpha_over_rank_times_b_a(
    kind: str, frozen: torch.dtype, store: Store, tmp_path: Path
) -> None:
    full = state(frozen)
    committed(store, tmp_path, full)
    out = export_hf(store, 7, store, tmp_path / "out", lora=LORA, dtype="float32", ema=kind == "ema")
    merged = load_file(out / "model.safetensors")
    assert merged.keys() == hf_shapes(MODEL).keys()
    for name, value in merged.items():
        expected, module = full[f"param.{name}"].float(), name.removesuffix(".weight")
        if module not in ADAPTED:
            assert torch.equal(value, expected), name
            continue
        down, up = (full[f"{kind}.{module}.{part}.weight"] for part in ("lora_A", "lora_B"))
        torch.testing.assert_close(value, expected + 2.0 * up @ down, rtol=1e-6, atol=1e-5)
        assert not torch.equal(value, expected)
    assert open_hf_folder(str(out)).model == MODEL  # another job can begin with it
    again = load_file(
        export_hf(store, 7, store, tmp_path / "again", lora=LORA, ema=kind == "ema") / "model.safetensors"
    )
    assert {value.dtype for value in again.values()} == {torch.bfloat16}
    assert all(torch.equal(value, merged[name].bfloat16()) for name, value in again.items())


def test_peft_gets_its_names_and_fields(store: Store, tmp_path: Path) -> None:
    full = state(torch.float32)
    committed(store, tmp_path, full)
    seen: list[tuple[int, int]] = []
    out = export_adapter(store, 7, tmp_path / "out", LORA, progress=lambda *done: seen.append(done))
    tensors = load_file(out / "adapter_model.safetensors")
    prefix = "base_model.model."
    assert "base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight" in tensors
    assert tensors.keys() == {f"{prefix}{m}.{part}.weight" for m in ADAPTED for part in ("lora_A", "lora_B")}
    assert all(torch.equal(value, full[f"param.{name.removeprefix(prefix)}"]) for name, value in tensors.items())
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 3, 6)
    assert config["target_modules"] == ["v_proj", "down_proj"]
    assert config["base_model_name_or_path"] == str(tmp_path / "source")
    assert seen[-1] == (sum(t.nbytes for t in tensors.values()),) * 2
    half = load_file(export_adapter(store, 7, tmp_path / "half", LORA, dtype="float16") / "adapter_model.safetensors")
    assert {value.dtype for value in half.values()} == {torch.float16}


@pytest.mark.parametrize(
    ("change", "lora", "sentence"),
    [
        ({"param.model.layers.0.self_attn.v_proj.lora_B.weight": None}, LORA, r"v_proj\.lora_B\.weight is missing"),
        ({"param.model.norm.weight": None}, LORA, r"model\.norm\.weight is missing"),
        ({}, None, r"layers\.0\.self_attn\.v_proj\.lora_A\.weight is no parameter of the model"),
        ({}, LoraConfig(rank=3), r"mlp\.down_proj\.lora_A\.weight is no parameter .*q_proj\.lora_A\.weight is missing"),
        ({}, LoraConfig(rank=2, target_modules=LORA.target_modules), r"has shape \(3, 48\); the model has \(2, 48\)"),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused(
    change: dict[str, Any], lora: LoraConfig | None, sentence: str, store: Store, tmp_path: Path
) -> None:
    committed(store, tmp_path, {key: tensor for key, tensor in state(torch.float32).items() if key not in change})
    with pytest.raises(RestoreError, match=sentence):
        export_hf(store, 7, store, tmp_path / "out", lora=lora)
    assert not (tmp_path / "out").exists()


def test_a_job_without_adapters_has_none_to_export(store: Store, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no lora section, and so no adapters"):
        export_adapter(store, 7, tmp_path / "out", None)
