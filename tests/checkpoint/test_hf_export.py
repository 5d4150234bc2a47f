from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file

from elastic_train.checkpoint.catalog import commit
from elastic_train.checkpoint.errors import CheckpointError, DamagedChunk, RestoreError
from elastic_train.checkpoint.hf_export import export_hf
from elastic_train.checkpoint.manifest import Manifest, object_path
from elastic_train.config.hf import hf_config, hf_shapes
from elastic_train.config.model import ModelConfig, RopeScaling
from elastic_train.data.corpus import open_corpus
from elastic_train.data.manifest import read_manifest
from elastic_train.data.prepare import prepare
from elastic_train.model.transformer import Transformer
from elastic_train.storage.store import Store
from tests.checkpoint.states import even_layout, first_claim, random_layout, save

import random  # isort: skip

TOKENS = torch.arange(64).view(2, 32) * 7 % 300

LLAMA3 = RopeScaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
CONFIGS = {
    "grouped heads": ModelConfig(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=100,
        vocab_size=301,
    ),
    "tied, own head size, llama3 rope, other constants": ModelConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=64,
        vocab_size=300,
        head_dim=20,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        rope_scaling=LLAMA3,
        tie_word_embeddings=True,
    ),
    "biases and own head size": ModelConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=100,
        vocab_size=301,
        head_dim=12,
        qkv_bias=True,
    ),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A prepared data set of a few texts."""
    folder = tmp_path_factory.mktemp("texts")
    for n in range(5):
        (folder / f"{n}.txt").write_text(f"Text number {n} is short, so that this takes no time at all.\n" * 20)
    return Store.open(prepare(open_corpus(str(folder)), str(tmp_path_factory.mktemp("data")), 300).uri)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "job"))


def random_model(config: ModelConfig) -> Transformer:
    """Weights of ordinary size; norms away from 1, so that a mix-up of them shows."""
    model = Transformer(config).to_empty(device="cpu")
    model.tie()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.1, generator=generator)
    return model


def checkpoint(
    store: Store, images: Path, model: Transformer, step: int = 7, layout: int | random.Random = 3
) -> Manifest:
    full = {f"param.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    full |= {key.replace("param.", "exp_avg."): torch.zeros_like(tensor) for key, tensor in full.items()}
    states = even_layout(full, layout) if isinstance(layout, int) else random_layout(full, layout)
    manifest = save(store, images, states, step, model=model.config.model_dump(mode="json"))
    assert commit(store, manifest, first_claim(store)).created
    return manifest


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shard_bytes", [10**9, 40_000])
def test_transformers_loads_the_export_and_gives_our_logits(
    name: str, shard_bytes: int, store: Store, tmp_path: Path, data: Store
) -> None:  # HF-01, HF-11
    transformers = pytest.importorskip("transformers")
    ours = random_model(CONFIGS[name])
    checkpoint(store, tmp_path, ours, layout=random.Random(2))
    out = export_hf(store, 7, data, tmp_path / "out", shard_bytes=shard_bytes)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        out, local_files_only=True, output_loading_info=True, attn_implementation="sdpa"
    )
    assert type(theirs).__name__ == ("Qwen2ForCausalLM" if CONFIGS[name].qkv_bias else "LlamaForCausalLM")
    assert theirs.dtype == torch.float32
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        difference = (ours(TOKENS) - theirs(TOKENS).logits).abs().max()
    assert difference < 1e-5


def test_the_tokenizer_is_the_data_sets(store: Store, tmp_path: Path, data: Store) -> None:
    transformers = pytest.importorskip("transformers")
    checkpoint(store, tmp_path, random_model(CONFIGS["grouped heads"]))
    out = export_hf(store, 7, data, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out, local_files_only=True)
    text = "Text number 3 is not <short>, käse  \n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    import tokenizers

    stored = data.read(read_manifest(data)[0].tokenizer.path).decode()
    assert ids == tokenizers.Tokenizer.from_str(stored).encode(text).ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == 0
    assert tokenizer.eos_token == "<|endoftext|>"


def test_the_weights_are_the_parameters_bit_for_bit_whatever_layout_saved_them(
    store: Store, tmp_path: Path, data: Store
) -> None:
    model = random_model(CONFIGS["grouped heads"])
    files = []
    for step in (1, 2, 3, 4):
        checkpoint(store, tmp_path, model, step, layout=step if step < 4 else random.Random(4))
        out = export_hf(store, step, data, tmp_path / f"out{step}")
        files.append((out / "model.safetensors").read_bytes())
    assert len(set(files)) == 1
    loaded = load_file(tmp_path / "out1/model.safetensors")
    assert loaded.keys() == dict(model.named_parameters()).keys() == hf_shapes(model.config).keys()
    assert all(torch.equal(loaded[name], parameter) for name, parameter in model.named_parameters())


def test_a_tied_head_is_not_exported(store: Store, tmp_path: Path, data: Store) -> None:  # HF-03
    model = random_model(CONFIGS["tied, own head size, llama3 rope, other constants"])
    checkpoint(store, tmp_path, model)
    out = export_hf(store, 7, data, tmp_path / "out")
    assert "lm_head.weight" not in load_file(out / "model.safetensors")
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True


def test_the_index_names_every_tensor_once_and_the_total_size(
    store: Store, tmp_path: Path, data: Store
) -> None:  # HF-07
    model = random_model(CONFIGS["grouped heads"])
    checkpoint(store, tmp_path, model)
    seen: list[tuple[int, int]] = []
    out = export_hf(store, 7, data, tmp_path / "out", shard_bytes=60_000, progress=lambda *step: seen.append(step))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert [path.name for path in files] == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
    ]
    assert len(files) > 3
    held = {}
    for path in files:
        with safetensors.safe_open(path, "pt") as file:
            held |= dict.fromkeys(file.keys(), path.name)
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(parameter.nbytes for parameter in model.parameters())
    total = index["metadata"]["total_size"]
    assert seen == sorted(seen)
    assert (seen[-1], {whole for _, whole in seen}) == ((total, total), {total})
    # Only a tensor that is larger than the limit by itself makes a file larger than it.
    assert all(path.stat().st_size < 60_000 + 4096 or len(load_file(path)) == 1 for path in files)


def test_config_json_has_every_field_of_the_model() -> None:
    config = CONFIGS["tied, own head size, llama3 rope, other constants"]
    written = hf_config(config, eos_id=5)
    expected: dict[str, Any] = config.model_dump(mode="json", exclude={"qkv_bias"})
    assert {key: written[key] for key in expected} == expected
    assert (written["architectures"], written["torch_dtype"]) == (["LlamaForCausalLM"], "float32")
    assert written["bos_token_id"] == written["eos_token_id"] == 5
    assert hf_config(CONFIGS["grouped heads"], eos_id=0)["head_dim"] == 8


def test_a_damaged_chunk_leaves_no_export(store: Store, tmp_path: Path, data: Store) -> None:
    checkpoint(store, tmp_path, random_model(CONFIGS["grouped heads"]))
    path = object_path(7, 1, 0)
    content = bytearray(store.read(path))
    content[5] ^= 1
    store.write(path, [content])
    with pytest.raises(DamagedChunk, match=r"rank-00000\.bin.*param\.model\.embed_tokens\.weight"):
        export_hf(store, 7, data, tmp_path / "exports" / "out")
    assert list((tmp_path / "exports").iterdir()) == []


def test_a_checkpoint_that_is_not_of_its_model_is_refused_with_every_difference(
    store: Store, tmp_path: Path, data: Store
) -> None:
    manifest = checkpoint(store, tmp_path, random_model(CONFIGS["grouped heads"]), step=7)
    other = CONFIGS["grouped heads"].model_dump(mode="json") | {"num_hidden_layers": 2, "vocab_size": 400}
    commit(
        store, manifest.model_copy(update={"step": 8, "objects": {}, "tensors": {}, "model": other}), first_claim(store)
    )
    with pytest.raises(RestoreError, match=r"step 8 is not one of its model: .*model\.norm\.weight is missing"):
        export_hf(store, 8, data, tmp_path / "out")
    with pytest.raises(CheckpointError, match="step 9 has no committed checkpoint"):
        export_hf(store, 9, data, tmp_path / "out")


def test_an_existing_folder_is_not_overwritten(store: Store, tmp_path: Path, data: Store) -> None:
    checkpoint(store, tmp_path, random_model(CONFIGS["grouped heads"]))
    (tmp_path / "out").mkdir()
    export_hf(store, 7, data, tmp_path / "out")
    with pytest.raises(CheckpointError, match="exists and is not an empty folder"):
        export_hf(store, 7, data, tmp_path / "out")


def test_a_tokenizer_with_more_entries_than_the_model_is_refused(store: Store, tmp_path: Path, data: Store) -> None:
    small = CONFIGS["grouped heads"].model_copy(update={"vocab_size": 260})
    checkpoint(store, tmp_path, random_model(small))
    with pytest.raises(CheckpointError, match=r"has \d+ entries; the model has vocab_size=260"):
        export_hf(store, 7, data, tmp_path / "out")


def test_memory_is_that_of_the_largest_tensor_not_of_the_model(store: Store, tmp_path: Path, data: Store) -> None:
    """60 MB of parameters, of which the largest has 2.1 MB."""
    config = CONFIGS["grouped heads"].model_copy(
        update={"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 8}
    )
    checkpoint(store, tmp_path, random_model(config))
    program = (
        "import resource, sys\n"
        "from elastic_train.checkpoint.hf_export import export_hf\n"
        "from elastic_train.storage.store import Store\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "export_hf(Store.open(sys.argv[1]), 7, Store.open(sys.argv[2]), sys.argv[3])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    command = [sys.executable, "-c", program, store.uri, data.uri, str(tmp_path / "out")]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * 1024
    assert (tmp_path / "out/model.safetensors").stat().st_size > 55e6
    assert grown < 20e6
