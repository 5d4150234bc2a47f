"""A Hugging Face model folder as a source of weights: configuration, index and headers, checked before any weight is.

Plain Python: the command line checks folders without loading torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_train.config.errors import ConfigError
from elastic_train.config.hf import differences, hf_shapes, model_from_hf
from elastic_train.config.job import Job
from elastic_train.config.model import ModelConfig
from elastic_train.config.operation import StorageConfig
from elastic_train.storage.errors import NotFound, StorageError
from elastic_train.storage.safetensors_header import DTYPE_BYTES, StoredTensor, read_header
from elastic_train.storage.store import Store

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
HEAD = "lm_head.weight"
SMALL_FILES = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""What belongs to a model beside its weights, where it is there."""
_BUFFER = "rotary_emb.inv_freq"
"""Old checkpoints have it; it follows from the configuration."""


@dataclass(frozen=True, slots=True)
class HfFolder:
    """A folder whose weights are exactly the parameters of ``model``.

    ``tensors``: HF name -> place of every parameter. ``tied_head``: place of a head that is in the file although the
    embedding is the head; its values must be the embedding's.
    """

    store: Store
    config: dict[str, Any]
    model: ModelConfig
    tensors: dict[str, StoredTensor]
    tied_head: StoredTensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters as they are stored."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def open_hf_folder(uri: str, storage: StorageConfig | None = None) -> HfFolder:
    """Read configuration, index and headers of the folder at ``uri`` (path or s3:// URI; ``storage`` has the endpoint).

    Raises:
        ConfigError: everything that keeps the folder from being a model to train, a sentence each.
        StorageError: storage does not answer.
    """
    store = Store.open(uri, storage)
    config = _read_json(store, CONFIG)
    model, problems = None, []
    try:
        model = model_from_hf(config)
    except ConfigError as error:
        problems += [f"{CONFIG}: {problem}" for problem in error.problems]
    stored, index_problems = _stored_tensors(store)
    problems += index_problems
    stored = {name: tensor for name, tensor in stored.items() if not name.endswith(_BUFFER)}
    tied_head = stored.pop(HEAD, None) if model and model.tie_word_embeddings else None
    if model and not index_problems:
        problems += _tensor_problems(stored, hf_shapes(model))
    if model is None or problems:
        raise ConfigError([f"{store.uri}: {problem}" for problem in problems])
    return HfFolder(store, config, model, {name: stored[name] for name in hf_shapes(model)}, tied_head)


def open_source(job: Job) -> HfFolder | None:
    """The folder of the job's ``init_from``, checked against the job; None where weights begin as random numbers.

    Raises ConfigError and StorageError as ``open_hf_folder``, and ConfigError for a job with another ``model``.
    """
    if job.init_from is None:
        return None
    folder = open_hf_folder(job.init_from, job.storage)
    problems = differences(folder.config, job)
    if problems:
        raise ConfigError(problems)
    return folder


def check_tokenizer(folder: HfFolder, sha256: str, data_uri: str) -> None:
    """Raises ConfigError unless the data's tokenizer (``sha256``) is the folder's; a folder may have none."""
    if not folder.store.exists("tokenizer.json"):
        return
    if hashlib.sha256(folder.store.read("tokenizer.json")).hexdigest() != sha256:
        raise ConfigError(
            [
                f"data.uri={data_uri}: its tokenizer is not the tokenizer.json of init_from={folder.store.uri}; "
                f"prepare the data with --tokenizer {folder.store.uri}"
            ]
        )


def _read_json(store: Store, path: str) -> dict[str, Any]:
    try:
        content = json.loads(store.read(path))
    except NotFound:
        raise ConfigError([f"{store.uri}: has no {path}; give the folder of a Hugging Face model"]) from None
    except ValueError as error:
        raise ConfigError([f"{store.uri}: {path} is not JSON: {error}"]) from None
    if not isinstance(content, dict):
        raise ConfigError([f"{store.uri}: {path} holds no mapping"])
    return content


def _stored_tensors(store: Store) -> tuple[dict[str, StoredTensor], list[str]]:
    """Every tensor of the model's files, and what is wrong with them. Files that no index names are ignored."""
    if not store.exists(INDEX):
        if not store.exists(SINGLE):
            return {}, [f"has neither {SINGLE} nor {INDEX}; other formats of weights, such as .bin, are not read"]
        tensors, problem = _header(store, SINGLE)
        return tensors, [problem] if problem else []
    if store.exists(SINGLE):
        return {}, [f"has both {SINGLE} and {INDEX}; remove the one that is not meant"]
    names = _read_json(store, INDEX).get("weight_map")
    if not isinstance(names, dict):
        return {}, [f"{INDEX} has no weight_map"]
    tensors, problems = {}, []
    for path in sorted(set(map(str, names.values()))):
        there, problem = _header(store, path)
        if problem:
            problems.append(problem)
            continue
        indexed = {name for name, place in names.items() if place == path}
        tensors.update(there)
        if absent := sorted(indexed - there.keys()):
            problems.append(f"{path} lacks {', '.join(absent)}, which {INDEX} places there")
        if extra := sorted(name for name in there.keys() - indexed if not name.endswith(_BUFFER)):
            problems.append(f"{path} holds {', '.join(extra)}, which {INDEX} does not place there")
    return tensors, problems


def _header(store: Store, path: str) -> tuple[dict[str, StoredTensor], str | None]:
    try:
        return read_header(store, path), None
    except NotFound:
        return {}, f"{path} is missing, which {INDEX} names"
    except StorageError as error:
        return {}, str(error)


def _tensor_problems(stored: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    missing = [name for name in shapes if name not in stored]
    unknown = [name for name in stored if name not in shapes]
    both = [name for name in shapes if name in stored]
    misshapen = [
        f"{name} has {stored[name].shape}, the model {shapes[name]}"
        for name in both
        if stored[name].shape != shapes[name]
    ]
    foreign = [f"{name} is {stored[name].dtype}" for name in both if stored[name].dtype not in DTYPE_BYTES]
    lists = {
        "missing tensors": missing,
        "unknown tensors": unknown,
        "wrong shapes": misshapen,
        f"dtypes other than {', '.join(DTYPE_BYTES)}": foreign,
    }
    return [f"{what}: {', '.join(names)}" for what, names in lists.items() if names]
