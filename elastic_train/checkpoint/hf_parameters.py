"""The parameters that a checkpoint has of its model, by their names in Hugging Face's files: all are there, or none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from elastic_train.checkpoint.description import union_volume
from elastic_train.checkpoint.errors import CheckpointError, RestoreError
from elastic_train.checkpoint.hf_weights import SavedAdapter
from elastic_train.checkpoint.manifest import Manifest, TensorRecord
from elastic_train.config.hf import hf_shapes
from elastic_train.config.lora import LoraConfig, adapter_shapes
from elastic_train.config.model import ModelConfig

PREFIX, AVERAGE_PREFIX = "param.", "ema."
"""Of the state's keys: the weights, and their moving average."""
TRAINED, FROZEN = ("float32",), ("float32", "bfloat16")
"""Dtypes in which weights are saved; frozen ones in the precision of compute."""

Saved = tuple[str, TensorRecord]
"""A key of the manifest, and its record."""


@dataclass(frozen=True, slots=True)
class SavedParameters:
    """``weights``: in HF's order. ``adapters``: those of ``lora``, every A before its B; none without it."""

    weights: dict[str, Saved]
    adapters: dict[str, Saved]
    lora: LoraConfig | None

    @classmethod
    def of(cls, manifest: Manifest, model: ModelConfig, lora: LoraConfig | None, *, ema: bool) -> SavedParameters:
        """Raises RestoreError that lists all that is not as the model wants it; CheckpointError without averages.

        ``ema``: what is trained comes from its moving average.
        """
        shapes = hf_shapes(model)
        adapted = {} if lora is None else adapter_shapes(shapes, lora)
        prefix = AVERAGE_PREFIX if ema else PREFIX
        saved = {key.removeprefix(prefix): (key, r) for key, r in manifest.tensors.items() if key.startswith(prefix)}
        if not saved and ema:
            raise CheckpointError(
                f"the checkpoint of step {manifest.step} has no averaged weights; training.ema_decay makes a job keep "
                "them"
            )
        frozen = {key.removeprefix(PREFIX): (key, r) for key, r in manifest.tensors.items() if key.startswith(PREFIX)}
        problems = [f"{name} is no parameter of the model" for name in saved if name not in shapes | adapted]
        problems += _problems(adapted, saved, TRAINED)
        problems += _problems(shapes, saved if lora is None else frozen, TRAINED if lora is None else FROZEN)
        if problems:
            raise RestoreError(problems, f"the checkpoint of step {manifest.step} is not one of its model")
        weights = saved if lora is None else frozen
        return cls({name: weights[name] for name in shapes}, {name: saved[name] for name in adapted}, lora)

    def adapter_of(self, name: str) -> SavedAdapter | None:
        """What is to be added to weight ``name``."""
        module = name.removesuffix(".weight")
        if self.lora is None or f"{module}.lora_A.weight" not in self.adapters:
            return None
        down, up = (self.adapters[f"{module}.{part}.weight"] for part in ("lora_A", "lora_B"))
        return SavedAdapter(down, up, self.lora.scale)


def _problems(
    shapes: Mapping[str, tuple[int, ...]], saved: Mapping[str, Saved], dtypes: tuple[str, ...]
) -> Iterator[str]:
    for name, shape in shapes.items():
        if name not in saved:
            yield f"{name} is missing"
            continue
        _, record = saved[name]
        if record.shape != shape:
            yield f"{name} has shape {record.shape}; the model has {shape}"
        elif record.dtype not in dtypes:
            yield f"{name} is {record.dtype}; master weights are float32"
        elif union_volume((chunk.offsets, chunk.sizes) for chunk in record.chunks) != math.prod(shape):
            yield f"{name} is not completely saved"
