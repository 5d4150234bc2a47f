"""A committed checkpoint as a Hugging Face model folder, written tensor by tensor with numpy alone.

Format of the weights: https://huggingface.co/docs/safetensors (8-byte little-endian header length, JSON header, data).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from elastic_train.checkpoint.description import union_volume
from elastic_train.checkpoint.errors import CheckpointError, Damage, DamagedChunk, RestoreError
from elastic_train.checkpoint.manifest import Manifest, TensorRecord, load_manifest
from elastic_train.checkpoint.sources import ObjectSource
from elastic_train.config.job import ModelConfig
from elastic_train.data import manifest as data_manifest
from elastic_train.storage.store import Store

PREFIX = "param."
SHARD_BYTES = 5 * 10**9
_DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}


def export_hf(
    store: Store,
    step: int,
    data: Store,
    out: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[str, int], None] = lambda name, nbytes: None,
) -> Path:
    """Writes the model of the checkpoint of ``step`` in the job folder ``store`` to the new folder ``out``.

    ``data`` is the prepared data set, for its tokenizer. Weight files hold up to ``shard_bytes`` bytes (a single larger
    tensor gets a file of its own). ``progress`` is called after each tensor with its name and bytes. Memory: up to
    twice the largest tensor. ``out`` appears only when it is complete.

    Raises CheckpointError when there is no such checkpoint, its parameters are not those of its model, or ``out`` is
    not empty; DamagedChunk when bytes in storage are not what the manifest says.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not an empty folder; give another one for the export")
    manifest = load_manifest(store, step)
    model = ModelConfig.model_validate(manifest.model, strict=False)
    tensors = _parameters(manifest, model)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        _write_tokenizer(partial, data, model)
        _write_weights(partial, store, tensors, shard_bytes, progress)
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def llama_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter in HF's Llama, in its order; a tied head has no entry of its own."""
    d, f = model.hidden_size, model.intermediate_size
    q, kv = model.num_attention_heads * model.head_size, model.num_key_value_heads * model.head_size
    layer = {
        "self_attn.q_proj": (q, d),
        "self_attn.k_proj": (kv, d),
        "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, q),
        "mlp.gate_proj": (f, d),
        "mlp.up_proj": (f, d),
        "mlp.down_proj": (d, f),
        "input_layernorm": (d,),
        "post_attention_layernorm": (d,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab_size, d)}
    for index in range(model.num_hidden_layers):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (d,)
    if not model.tie_word_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, d)
    return shapes


def hf_config(model: ModelConfig, eos_id: int) -> dict[str, Any]:
    """``config.json``. Documents are separated by one token, so it both begins and ends a text."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": eos_id,
        "eos_token_id": eos_id,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "initializer_range": model.initializer_range,
        "intermediate_size": model.intermediate_size,
        "max_position_embeddings": model.max_position_embeddings,
        "mlp_bias": False,
        "num_attention_heads": model.num_attention_heads,
        "num_hidden_layers": model.num_hidden_layers,
        "num_key_value_heads": model.num_key_value_heads,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_scaling": model.rope_scaling.model_dump() if model.rope_scaling else None,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tie_word_embeddings,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": model.vocab_size,
    }


def _parameters(manifest: Manifest, model: ModelConfig) -> dict[str, TensorRecord]:
    """HF name -> record, in HF's order. Raises RestoreError that lists all that is not as the model wants it."""
    saved = {key.removeprefix(PREFIX): record for key, record in manifest.tensors.items() if key.startswith(PREFIX)}
    shapes = llama_shapes(model)
    problems = [f"{name} is no parameter of the model" for name in saved if name not in shapes]
    for name, shape in shapes.items():
        record = saved.get(name)
        if record is None:
            problems.append(f"{name} is missing")
        elif record.shape != shape:
            problems.append(f"{name} has shape {record.shape}; the model has {shape}")
        elif record.dtype not in _DTYPES:
            problems.append(f"{name} is {record.dtype}; safetensors export knows {', '.join(_DTYPES)}")
        elif union_volume((chunk.offsets, chunk.sizes) for chunk in record.chunks) != math.prod(shape):
            problems.append(f"{name} is not completely saved")
    if problems:
        raise RestoreError(problems, f"the checkpoint of step {manifest.step} is not one of its model")
    return {name: saved[name] for name in shapes}


def _write_tokenizer(out: Path, data: Store, model: ModelConfig) -> None:
    """Copies the data set's tokenizer and writes the JSON files that say how to use it, ``config.json`` among them."""
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
    (out / "tokenizer.json").write_bytes(text)
    special = {"bos_token": tokenizer.eos_token, "eos_token": tokenizer.eos_token}
    files: dict[str, dict[str, Any]] = {
        "config.json": hf_config(model, tokenizer.eos_id),
        "generation_config.json": {"bos_token_id": tokenizer.eos_id, "eos_token_id": tokenizer.eos_id},
        "special_tokens_map.json": special,
        "tokenizer_config.json": {
            **special,
            "clean_up_tokenization_spaces": False,
            "model_max_length": model.max_position_embeddings,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


def _write_weights(
    out: Path,
    store: Store,
    tensors: Mapping[str, TensorRecord],
    shard_bytes: int,
    progress: Callable[[str, int], None],
) -> None:
    files = list(_split(tensors, shard_bytes))
    weight_map = {}
    for number, names in enumerate(files, 1):
        path = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        weight_map.update(dict.fromkeys(names, path))
        with (out / path).open("wb") as file:
            _write_header(file, {name: tensors[name] for name in names})
            for name in names:
                values = _read_tensor(store, name, tensors[name])
                file.write(values.data)
                progress(name, values.nbytes)
    if len(files) > 1:
        total = sum(_nbytes(record) for record in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _split(tensors: Mapping[str, TensorRecord], shard_bytes: int) -> Iterator[list[str]]:
    """Names for each file, in order, a new file before one would exceed ``shard_bytes``."""
    names: list[str] = []
    size = 0
    for name, record in tensors.items():
        nbytes = _nbytes(record)
        if names and size + nbytes > shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += nbytes
    yield names


def _write_header(file: BinaryIO, tensors: Mapping[str, TensorRecord]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, record in tensors.items():
        begin, end = end, end + _nbytes(record)
        header[name] = {"dtype": _DTYPES[record.dtype][0], "shape": list(record.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    file.write(struct.pack("<Q", len(text)) + text)


def _nbytes(record: TensorRecord) -> int:
    return math.prod(record.shape) * _DTYPES[record.dtype][1]


def _read_tensor(store: Store, name: str, record: TensorRecord) -> npt.NDArray[np.uint8]:
    """All bytes of a tensor, row-major, from its verified chunks."""
    item = _DTYPES[record.dtype][1]
    # A trailing dim of bytes instead of a dtype: numpy has no bfloat16.
    values = np.empty((*record.shape, item), dtype=np.uint8)
    for chunk in record.chunks:
        held = ObjectSource(store, chunk.object).read(chunk.byte_offset, chunk.nbytes)
        actual = xxhash.xxh3_64_hexdigest(held.data)
        if actual != chunk.xxh3:
            place = chunk.object, PREFIX + name, chunk.byte_offset, chunk.nbytes
            raise DamagedChunk(Damage(*place, f"xxh3 {chunk.xxh3}", f"xxh3 {actual}"))
        box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        values[box] = held.reshape((*chunk.sizes, item))
    return values
