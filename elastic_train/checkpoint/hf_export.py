"""A committed checkpoint as a Hugging Face model folder, written with numpy alone."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elastic_train.checkpoint.catalog import load_manifest
from elastic_train.checkpoint.errors import CheckpointError
from elastic_train.checkpoint.hf_parameters import SavedParameters
from elastic_train.checkpoint.hf_source import HfSource, kept_source
from elastic_train.checkpoint.hf_weights import SavedTensor, write_weights
from elastic_train.config.hf import hf_config
from elastic_train.config.lora import LoraConfig
from elastic_train.config.model import ModelConfig
from elastic_train.data import manifest as data_manifest
from elastic_train.model.hf_folder import CONFIG
from elastic_train.storage.store import Store

SHARD_BYTES = 5 * 10**9
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""What weights can be exported in: torch's name -> safetensors' name."""


def export_hf(
    store: Store,
    step: int,
    data: Store,
    out: str | Path,
    *,
    lora: LoraConfig | None = None,
    dtype: str | None = None,
    ema: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Writes the model of the checkpoint of ``step`` in the job folder ``store`` to the new folder ``out``.

    A job that began with the weights of a Hugging Face folder gets that folder's small files back, and every tensor in
    its dtype there. Another job's model is float32, with the tokenizer of the prepared data set ``data``. ``dtype``
    ("bfloat16") is another choice. ``lora``: of the job; its adapters are added to the weights. ``ema``: the averaged
    weights. Weight files hold up to ``shard_bytes`` bytes (a single larger tensor gets a file of its own). ``progress``
    gets the bytes written so far and in all. Memory: a few blocks of ``hf_weights.READ_BYTES``. ``out`` appears only
    when it is complete.

    Raises CheckpointError when there is no such checkpoint, its parameters are not those of its model, or ``out`` is
    not empty; DamagedChunk when bytes in storage are not what the manifest says.
    """
    require_dtype(dtype)
    with new_folder(out) as partial:
        manifest = load_manifest(store, step)
        model = ModelConfig.model_validate(manifest.model, strict=False)
        source = kept_source(store)
        saved = SavedParameters.of(manifest, model, lora, ema=ema)
        tensors = {
            name: SavedTensor(key, record, _dtype(name, dtype, source), saved.adapter_of(name))
            for name, (key, record) in saved.weights.items()
        }
        for name, content in _small_files(model, source, data, dtype).items():
            (partial / name).write_bytes(content)
        report = reporter(tensors, progress)
        write_weights(partial, store, tensors, manifest.block_bytes, shard_bytes, report)
    return Path(out)


def require_dtype(dtype: str | None) -> None:
    """Raises CheckpointError unless weights can be exported in ``dtype``."""
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype={dtype}: must be one of {', '.join(DTYPES)}")


@contextmanager
def new_folder(out: str | Path) -> Iterator[Path]:
    """A folder to write into, which becomes ``out`` at the end. Raises CheckpointError where ``out`` is not empty."""
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not an empty folder; give another one for the export")
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        yield partial
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def reporter(tensors: Mapping[str, SavedTensor], progress: Callable[[int, int], None]) -> Callable[[int], None]:
    """Takes bytes just written, and gives ``progress`` those written so far and in all."""
    total, done = sum(tensor.nbytes for tensor in tensors.values()), 0

    def report(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    return report


def _dtype(name: str, dtype: str | None, source: HfSource | None) -> str:
    if dtype is not None:
        return DTYPES[dtype]
    return "F32" if source is None else source.dtypes[name]


def _small_files(model: ModelConfig, source: HfSource | None, data: Store, dtype: str | None) -> dict[str, bytes]:
    """Name -> content of everything but weights: as in the source; else ``config.json`` and the data's tokenizer."""
    files = _made_files(model, data) if source is None else dict(source.files)
    if dtype is not None:
        config = json.loads(files[CONFIG])
        config["dtype" if "dtype" in config else "torch_dtype"] = dtype
        files[CONFIG] = _json(config)
    return files


def _made_files(model: ModelConfig, data: Store) -> dict[str, bytes]:
    """``config.json``, and the data set's tokenizer with the files that say how to use it."""
    manifest, _ = data_manifest.read_manifest(data)
    tokenizer = manifest.tokenizer
    if tokenizer.vocab_size > model.vocab_size:
        entries = tokenizer.vocab_size
        raise CheckpointError(
            f"the tokenizer of {data.uri} has {entries} entries; the model has vocab_size={model.vocab_size}"
        )
    text = data.read(tokenizer.path)
    if hashlib.sha256(text).hexdigest() != tokenizer.sha256:
        raise CheckpointError(f"{tokenizer.path} in {data.uri} has not the sha256 of its manifest, {tokenizer.sha256}")
    special = {"bos_token": tokenizer.eos_token, "eos_token": tokenizer.eos_token}
    files: dict[str, dict[str, Any]] = {
        CONFIG: hf_config(model, tokenizer.eos_id),
        "generation_config.json": {"bos_token_id": tokenizer.eos_id, "eos_token_id": tokenizer.eos_id},
        "special_tokens_map.json": special,
        "tokenizer_config.json": {
            **special,
            "clean_up_tokenization_spaces": False,
            "model_max_length": model.max_position_embeddings,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    }
    return {"tokenizer.json": text} | {name: _json(content) for name, content in files.items()}


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
