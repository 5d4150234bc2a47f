from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from elastic_train.config.errors import ConfigError
from elastic_train.config.hf import model_from_hf
from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.operation import StorageConfig
from elastic_train.model.hf_folder import open_hf_folder
from elastic_train.parallel.shard import LocalShard
from elastic_train.storage.errors import StorageError
from elastic_train.training import pretrained
from elastic_train.training.pretrained import load_pretrained
from tests.checkpoint.states import State, emptied, even_layout, random_layout, same
from tests.hf_models import SHAPE, hf_loss, load_hf, save_hf
from tests.ranks import run_ranks
from tests.training.pretrained_ranks import peak_of_import, start
from tests.training.runs import assemble
from tests.training.synthetic import SyntheticBatches, small_job

pytest.importorskip("transformers")

FAMILIES: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "llama": ("Llama", torch.float32, {"rms_norm_eps": 1e-5}),
    "mistral": ("Mistral", torch.bfloat16, {"head_dim": 16, "sliding_window": 32}),
    "qwen2": ("Qwen2", torch.float16, {"rope_theta": 1e6}),
    "qwen2 tied": ("Qwen2", torch.bfloat16, {"tie_word_embeddings": True}),
}
LAYOUTS = [Layout(), Layout(tp=2), Layout(dp_shard=3), Layout(pp=2)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: save_hf(folder / name, family, dtype, **config) for name, (family, dtype, config) in FAMILIES.items()}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All stored tensors, as they are."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def job_from(folder: Path, **sections: Any) -> Job:
    config = open_hf_folder(str(folder)).config
    job = small_job(training={"global_batch": 6}, **sections)
    return job.model_copy(update={"init_from": str(folder), "model": model_from_hf(config)})


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_layout_begins_with_the_stored_values_and_transformers_loss(
    name: str, layout: Layout, folders: dict[str, Path]
) -> None:  # HF-01, HF-11
    job = job_from(folders[name])
    results = run_ranks(start, layout.world_size, job, layout, 0)
    whole = assemble([state for _, state in results])
    stored = weights(folders[name])
    assert {key.removeprefix("param.") for key in whole if key.startswith("param.")} == stored.keys()
    for key, value in whole.items():
        kind, _, tensor = key.partition(".")
        expected = stored[tensor].float().numpy() if kind == "param" else np.zeros_like(value)
        assert np.array_equal(value, expected), key
    batches = SyntheticBatches(job)
    theirs = hf_loss(load_hf(folders[name]), [batches.slot(1, index) for index in range(6)])
    for (loss,), _ in results:
        assert loss == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_boxes_of_any_shape_are_read_in_blocks_of_any_size(
    seed: int, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(pretrained, "BLOCK_BYTES", rng.choice([1, 100, 1000, 10**9]))
    folder = folders[rng.choice(list(FAMILIES))]
    full = {name: tensor.float() for name, tensor in weights(folder).items()}
    for state in [*random_layout(full, rng), *even_layout(full, 3, dim=1)]:
        loaded = emptied(state)
        load_pretrained(open_hf_folder(str(folder)), loaded)
        assert same(loaded, state)


@pytest.mark.slow
def test_weights_come_from_object_storage_by_ranges(
    folders: dict[str, Path], s3_environment: Any, s3_bucket: str
) -> None:
    client = s3_environment.client()
    for path in folders["llama"].iterdir():
        client.put_object(Bucket=s3_bucket, Key=f"models/llama/{path.name}", Body=path.read_bytes())
    storage = StorageConfig(endpoint_url=s3_environment.endpoint_url)
    full = weights(folders["llama"])
    for state in even_layout(full, 3, dim=1):
        loaded = emptied(state)
        load_pretrained(open_hf_folder(f"s3://{s3_bucket}/models/llama", storage), loaded)
        assert same(loaded, state)


def tied_with_head(folders: dict[str, Path], tmp_path: Path, change: float) -> tuple[str, State]:
    """A tied model whose file has a head too, and the state that its tensors give."""
    tensors = weights(folders["qwen2 tied"])
    head = tensors["model.embed_tokens.weight"].clone()
    head[200, 3] += change
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folders["qwen2 tied"] / "config.json").read_bytes())
    return str(tmp_path), even_layout({name: tensor.float() for name, tensor in tensors.items()}, 1)[0]


def test_a_stored_head_that_equals_the_tied_embedding_is_left_out(folders: dict[str, Path], tmp_path: Path) -> None:
    folder, state = tied_with_head(folders, tmp_path, 0.0)
    loaded = emptied(state)
    load_pretrained(open_hf_folder(folder), loaded)
    assert same(loaded, state)


def test_a_stored_head_that_differs_from_the_tied_embedding_is_refused(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "BLOCK_BYTES", 100 * 64 * 2)
    folder, state = tied_with_head(folders, tmp_path, 1.0)
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight in the rows 200 "):
        load_pretrained(open_hf_folder(folder), emptied(state))


def test_an_empty_shard_reads_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    """The weights are gone by then: reading them fails."""
    folder = open_hf_folder(str(shutil.copytree(folders["llama"], tmp_path / "gone")))
    for file in (tmp_path / "gone").glob("*.safetensors"):
        file.unlink()
    empty, full = (LocalShard(torch.empty(rows, 64), (301, 64), (301 - rows, 0)) for rows in (0, 1))
    load_pretrained(folder, {"model.embed_tokens.weight": empty})
    with pytest.raises(StorageError, match="safetensors"):
        load_pretrained(folder, {"model.embed_tokens.weight": full})


@pytest.mark.slow
def test_four_ranks_together_hold_less_than_two_models(tmp_path: Path) -> None:
    """MEM-15, at 125 MB. What each rank's shard of the weights takes is counted."""
    size = {"hidden_size": 512, "num_hidden_layers": 6, "intermediate_size": 2816, "vocab_size": 5000}
    folder = save_hf(tmp_path, shard_size="1GB", **SHAPE | size)
    nbytes = (folder / "model.safetensors").stat().st_size
    assert nbytes > 120e6
    peaks = run_ranks(peak_of_import, 4, job_from(folder), Layout(dp_shard=2, tp=2))
    assert sum(peaks) < 2 * nbytes, f"{[peak // 2**20 for peak in peaks]} MiB for a file of {nbytes // 2**20} MiB"
