"""Hugging Face folders with random weights, written without transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from elastic_train.config.hf import hf_config, hf_shapes
from elastic_train.config.model import ModelConfig
from elastic_train.storage.safetensors_header import header_bytes


def write_hf(
    folder: Path,
    model: ModelConfig,
    dtype: str = "F32",
    change: Callable[[str, npt.NDArray[np.float32]], None] = lambda name, values: None,
) -> Path:
    """Norms around 1, all else around 0; ``change`` may write into the values of a tensor. ``dtype``: F32 or BF16."""
    generator = np.random.default_rng(3)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config(model, eos_id=0)))
    shapes = hf_shapes(model)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header_bytes({name: (dtype, shape) for name, shape in shapes.items()}))
        for name, shape in shapes.items():
            values = generator.normal(1.0 if len(shape) == 1 else 0.0, 0.02, shape).astype(np.float32)
            change(name, values)
            # The upper half of a float32 is a bfloat16.
            file.write((values if dtype == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16)).tobytes())
    return folder
