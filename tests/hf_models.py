"""Tiny Hugging Face models with random weights, made and run by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elastic_train.data.samples import Slot

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 301,
    "max_position_embeddings": 512,
}
"""8 heads of width 8 over 2: no two of these numbers are equal, so that a mix-up of them shows (HF-01)."""


def save_hf(
    folder: Path, family: str = "Llama", dtype: torch.dtype = torch.float32, shard_size: str = "40KB", **config: Any
) -> Path:
    """Save a ``family`` model in ``dtype``; norms are away from 1 and biases from 0, so that they matter."""
    import transformers

    made = getattr(transformers, f"{family}Config")(**SHAPE | config)
    model = getattr(transformers, f"{family}ForCausalLM")(made)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.1, generator=generator)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def load_hf(folder: Path) -> Any:
    """The model in float32, as transformers reads it. Fails unless the folder has exactly its tensors."""
    import transformers

    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, output_loading_info=True, dtype=torch.float32, attn_implementation="sdpa"
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@torch.no_grad()
def hf_loss(model: Any, slots: list[Slot]) -> float:
    """Mean loss over all valid tokens."""
    ids, labels, _ = (torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*slots, strict=True))
    logits = model(ids).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


@torch.no_grad()
def hf_logits(model: Any, ids: Tensor) -> Tensor:
    return model(ids).logits
