"""The adapters of a committed checkpoint as a folder of PEFT's, written with numpy alone.

Names and fields are PEFT's (``peft/tuners/lora/config.py``, ``peft/utils/save_and_load.py``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_train.checkpoint.catalog import load_manifest
from elastic_train.checkpoint.errors import CheckpointError
from elastic_train.checkpoint.hf_export import DTYPES, new_folder, reporter, require_dtype
from elastic_train.checkpoint.hf_parameters import SavedParameters
from elastic_train.checkpoint.hf_source import kept_source
from elastic_train.checkpoint.hf_weights import SavedTensor, write_file
from elastic_train.config.lora import LoraConfig
from elastic_train.config.model import ModelConfig
from elastic_train.storage.store import Store

PEFT_PREFIX = "base_model.model."
"""In front of every name of the model."""


def export_adapter(
    store: Store,
    step: int,
    out: str | Path,
    lora: LoraConfig | None,
    *,
    dtype: str | None = None,
    ema: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Writes ``adapter_config.json`` and ``adapter_model.safetensors`` to the new folder ``out``.

    ``lora``: of the job. ``dtype``: None is float32, as adapters are trained. All else as ``export_hf``.
    """
    if lora is None:
        raise CheckpointError("the job has no lora section, and so no adapters; export the whole model")
    require_dtype(dtype)
    with new_folder(out) as partial:
        manifest = load_manifest(store, step)
        model = ModelConfig.model_validate(manifest.model, strict=False)
        saved = SavedParameters.of(manifest, model, lora, ema=ema).adapters
        written = DTYPES[dtype or "float32"]
        tensors = {f"{PEFT_PREFIX}{name}": SavedTensor(key, r, written) for name, (key, r) in saved.items()}
        source = kept_source(store)
        config = peft_config(lora, None if source is None else source.uri)
        (partial / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        path, report = partial / "adapter_model.safetensors", reporter(tensors, progress)
        write_file(path, store, tensors, manifest.block_bytes, report)
    return Path(out)


def peft_config(lora: LoraConfig, base: str | None) -> dict[str, Any]:
    """``adapter_config.json`` for adapters of the model at ``base``, to be used as they are."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
    }
