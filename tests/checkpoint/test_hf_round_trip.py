"""A Hugging Face model into the shards of a layout and out again through a checkpoint."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file

from elastic_train.checkpoint.catalog import commit
from elastic_train.checkpoint.errors import CheckpointError
from elastic_train.checkpoint.hf_export import export_hf
from elastic_train.checkpoint.hf_source import keep_source, kept_source
from elastic_train.checkpoint.hf_weights import _narrowed
from elastic_train.config.hf import model_from_hf
from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.model.hf_folder import open_hf_folder, open_source
from elastic_train.model.transformer import Transformer
from elastic_train.parallel.shard import LocalShard
from elastic_train.storage.safetensors_header import read_header
from elastic_train.storage.store import Store
from elastic_train.training.pretrained import load_pretrained
from tests.checkpoint.states import State, first_claim, save
from tests.hf_models import hf_logits, load_hf, save_hf
from tests.ranks import run_ranks
from tests.training.pretrained_ranks import start
from tests.training.synthetic import small_job

pytest.importorskip("transformers")

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "job"))


def job_from(folder: Path) -> Job:
    config = open_hf_folder(str(folder)).config
    return small_job().model_copy(update={"init_from": str(folder), "model": model_from_hf(config)})


def trained(job: Job, layout: Layout, steps: int, store: Store, images: Path) -> list[float]:
    """Begin with ``init_from``, train, commit the checkpoint of ``steps``; losses as ``start`` gives them."""
    results = run_ranks(start, layout.world_size, job, layout, steps)
    states: list[State] = [
        {key: LocalShard(torch.from_numpy(values), shape, offsets) for key, (shape, offsets, values) in state.items()}
        for _, state in results
    ]
    source = open_source(job)
    assert source is not None
    keep_source(source, store)
    assert commit(
        store, save(store, images, states, steps, model=job.model.model_dump(mode="json")), first_claim(store)
    ).created
    return results[0][0]


def stored(folder: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Name -> dtype, shape and sha256 of every tensor's bytes; fails if one is there twice."""
    found: dict[str, tuple[str, tuple[int, ...], str]] = {}
    reader = Store.open(str(folder))
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in read_header(reader, path.name).items():
            assert name not in found
            data = reader.read(path.name, tensor.begin, tensor.nbytes)
            found[name] = (tensor.dtype, tensor.shape, hashlib.sha256(data).hexdigest())
    return found


def config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


MODELS: dict[str, tuple[str, torch.dtype, dict[str, Any], Layout]] = {
    "llama": ("Llama", torch.float32, {}, Layout(tp=2)),
    "mistral": ("Mistral", torch.bfloat16, {"sliding_window": None}, Layout(dp_shard=3)),
    "qwen2": ("Qwen2", torch.float16, {}, Layout(pp=2, tp=2)),
    "qwen2 tied": ("Qwen2", torch.bfloat16, {"tie_word_embeddings": True}, Layout(dp_shard=2, tp=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_without_a_step_every_byte_comes_back(name: str, store: Store, tmp_path: Path) -> None:
    """HF-01: the sha256 of every tensor; and of several files, HF-07: an index that has each tensor once."""
    family, dtype, config, layout = MODELS[name]
    folder = save_hf(tmp_path / "source", family, dtype, **config)
    (folder / "tokenizer.json").write_text('{"any": "bytes"}')
    trained(job_from(folder), layout, 0, store, tmp_path)
    out = export_hf(store, 0, store, tmp_path / "out", shard_bytes=40_000)
    assert stored(out) == stored(folder)
    for small in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (out / small).read_bytes() == (folder / small).read_bytes()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    tensors = {key: value for path in out.glob("*.safetensors") for key, value in load_file(path).items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    for tensor, path in index["weight_map"].items():
        with safe_open(out / path, "pt") as file:
            assert tensor in file.keys()  # noqa: SIM118


def test_a_tied_model_that_was_trained_comes_back_with_one_table(store: Store, tmp_path: Path) -> None:
    """HF-03: three steps, then transformers gives the loss that the engine has at these weights."""
    folder = save_hf(tmp_path / "source", "Qwen2", torch.bfloat16, tie_word_embeddings=True)
    job = job_from(folder)
    trained(job, Layout(tp=2), 3, store, tmp_path)
    out = export_hf(store, 3, store, tmp_path / "out", dtype="float32")
    assert "lm_head.weight" not in stored(out)
    assert config_of(out) == config_of(folder) | {"dtype": "float32"}
    ours = Transformer(job.model).to_empty(device="cpu")
    ours.tie()
    shards = {name: LocalShard(p.detach(), tuple(p.shape), (0,) * p.dim()) for name, p in ours.named_parameters()}
    load_pretrained(open_hf_folder(str(out)), shards)
    ids = torch.arange(16)[None] * 7 % 300
    assert (hf_logits(load_hf(out), ids) - hf_logits(load_hf(folder), ids)).abs().max() > 0.1
    with torch.no_grad():
        assert (ours(ids) - hf_logits(load_hf(out), ids)).abs().max() < 1e-5
    # In the dtype of its source it is the float32 export, rounded.
    rounded = export_hf(store, 3, store, tmp_path / "rounded")
    exact, half = (
        {name: t for path in place.glob("*.safetensors") for name, t in load_file(path).items()}
        for place in (out, rounded)
    )
    assert all(torch.equal(half[name], exact[name].bfloat16()) for name in exact)
    assert config_of(rounded) == config_of(folder)


def test_a_vocabulary_that_tp_does_not_divide_is_exported_as_it_was(store: Store, tmp_path: Path) -> None:
    """HF-05: 50,257 rows under tp 1, 2 and 4; so do the rows that pad a tokenizer come back."""
    shape = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 16}
    folder = save_hf(tmp_path / "source", "Llama", torch.bfloat16, "1GB", vocab_size=50257, **shape)
    job = job_from(folder)
    for step, tp in enumerate((1, 2, 4)):
        results = run_ranks(start, tp, job, Layout(tp=tp), 0)
        states = [{k: LocalShard(torch.from_numpy(v), s, o) for k, (s, o, v) in state.items()} for _, state in results]
        keep_source(open_hf_folder(str(folder)), store)
        commit(store, save(store, tmp_path, states, step, model=job.model.model_dump(mode="json")), first_claim(store))
        out = export_hf(store, step, store, tmp_path / f"out{tp}")
        assert stored(out) == stored(folder)
        assert stored(out)["lm_head.weight"][1] == (50257, 16)
        assert config_of(out)["vocab_size"] == 50257


@pytest.mark.slow
def test_the_rotary_settings_survive_and_act_at_position_20000(store: Store, tmp_path: Path) -> None:
    """HF-09: theta, scaling, epsilon, dtype and end-of-text ids; old and new spelling of the rotary fields."""
    shape = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
    }
    own = {"max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "eos_token_id": [298, 300], "vocab_size": 301}
    folder = save_hf(
        tmp_path / "source", "Llama", torch.bfloat16, "1GB", **shape, **own, head_dim=8, rope_parameters=LLAMA3
    )
    new = config_of(folder)
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "dtype")}
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    old |= {"rope_theta": 500_000.0, "rope_scaling": scaling, "torch_dtype": "bfloat16"}
    assert model_from_hf(new) == model_from_hf(old)
    (folder / "config.json").write_text(json.dumps(old))
    job = job_from(folder)
    trained(job, Layout(), 0, store, tmp_path)
    out = export_hf(store, 0, store, tmp_path / "out")
    assert config_of(out) == old
    assert {dtype for dtype, _, _ in stored(out).values()} == {"BF16"}
    ours = Transformer(job.model).to_empty(device="cpu")
    shards = {name: LocalShard(p.detach(), tuple(p.shape), (0,) * p.dim()) for name, p in ours.named_parameters()}
    load_pretrained(open_hf_folder(str(out)), shards)
    ids = torch.arange(20_001)[None] * 7 % 301
    theirs = load_hf(folder)
    assert theirs.config.rope_parameters["rope_theta"] == 500_000.0
    with torch.no_grad():
        assert (ours(ids)[0, -16:] - theirs(ids, logits_to_keep=16).logits[0]).abs().max() < 1e-5


def test_every_tensor_keeps_its_own_dtype(store: Store, tmp_path: Path) -> None:
    """Norms in float32 beside matrices in bfloat16, in one file whose configuration says bfloat16."""
    folder = save_hf(tmp_path / "source", "Llama", torch.bfloat16, "1GB")
    path = folder / "model.safetensors"
    save_file({name: t.float() if t.dim() == 1 else t for name, t in load_file(path).items()}, path)
    trained(job_from(folder), Layout(dp_shard=2), 0, store, tmp_path)
    assert stored(export_hf(store, 0, store, tmp_path / "out")) == stored(folder)
    halves = export_hf(store, 0, store, tmp_path / "halves", dtype="float16")
    assert {dtype for dtype, _, _ in stored(halves).values()} == {"F16"}
    assert config_of(halves)["dtype"] == "float16"


def test_a_job_from_random_weights_has_kept_nothing(store: Store) -> None:
    assert kept_source(store) is None


def test_averaged_weights_are_exported_where_there_are_some(store: Store, tmp_path: Path) -> None:
    folder = save_hf(tmp_path / "source", "Llama", torch.float32, "1GB")
    job = job_from(folder)
    results = run_ranks(start, 2, job, Layout(dp_shard=2), 0)
    states = [{k: LocalShard(torch.from_numpy(v), s, o) for k, (s, o, v) in state.items()} for _, state in results]
    model = job.model.model_dump(mode="json")
    commit(store, save(store, tmp_path, states, 1, model=model), first_claim(store))
    keep_source(open_hf_folder(str(folder)), store)
    with pytest.raises(CheckpointError, match=r"step 1 has no averaged weights; training\.ema_decay makes"):
        export_hf(store, 1, store, tmp_path / "out", ema=True)
    for state in states:
        for key in [key for key in state if key.startswith("param.")]:
            shard = state[key]
            average = LocalShard(shard.tensor / 2, shard.global_shape, shard.offsets)
            state["ema." + key.removeprefix("param.")] = average
    commit(store, save(store, tmp_path, states, 2, model=model), first_claim(store))
    averaged = load_file(export_hf(store, 2, store, tmp_path / "ema", ema=True) / "model.safetensors")
    plain = load_file(folder / "model.safetensors")
    assert all(torch.equal(averaged[name], plain[name] / 2) for name in plain)


def test_an_unknown_dtype_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="dtype=int8: must be one of float32, bfloat16, float16"):
        export_hf(store, 1, store, tmp_path / "out", dtype="int8")


def test_rounding_is_torchs() -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, 200_000, dtype=np.uint32)
    special = np.array([0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF, 0x7F800000, 0, 0x80000000, 1, 0x3F808000, 0x3F818000])
    values = np.concatenate([bits, special.astype(np.uint32)]).view(np.float32)
    ours = torch.from_numpy(_narrowed(values, "BF16", "x").view(np.int16)).view(torch.bfloat16)
    theirs = torch.from_numpy(values).bfloat16()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours[~ours.isnan()].view(torch.int16), theirs[~theirs.isnan()].view(torch.int16))
    with pytest.raises(CheckpointError, match="x has values beyond those of float16"):
        _narrowed(np.array([65520.0], dtype=np.float32), "F16", "x")
