"""The work that all peers do: the quickstart's model on random tokens, its step written by hand with plain torch.

Imports nothing of Ray and nothing of torchft, so that each peer runs it in an environment of its own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from elastic_train.config.model import ModelConfig
from elastic_train.model.transformer import Transformer

MODEL = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 704,
    "vocab_size": 4096,
}
TOKENS, BATCH = 256, 8
SAVE_EVERY = 10
"""Steps between two checkpoints, which go to memory (/dev/shm): as cheap as saving can be for a peer."""


def make_model() -> Transformer:
    """With the same random weights everywhere."""
    model = Transformer(ModelConfig.model_validate(MODEL)).to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model


def batch_of(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the global batch: [samples, TOKENS] ids and labels, int64."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, MODEL["vocab_size"], (BATCH, TOKENS + 1), generator=generator)[rank::ranks]
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: Any, step: int, rank: int, ranks: int) -> torch.Tensor:
    ids, labels = batch_of(step, rank, ranks)
    loss: torch.Tensor = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    return loss


def teller(folder: Path) -> Callable[[int, float], None]:
    """Writes a line per finished step of this process: its pid, the step, the time, the seconds it took."""
    lines = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def tell(step: int, seconds: float) -> None:
        lines.write(json.dumps({"pid": os.getpid(), "step": step, "time": time.time(), "seconds": seconds}) + "\n")

    return tell


def train_fsdp(folder: Path) -> None:
    """FSDP2 in the process group that is there, with a distributed checkpoint every ``SAVE_EVERY`` steps."""
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model: Any = make_model()
    for block in model.blocks.values():
        fully_shard(block, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=True)
    step, tell = _load(model, optimizer, folder / "checkpoints"), teller(folder)
    while True:
        step += 1
        started = time.time()
        optimizer.zero_grad()
        loss_of(model, step, rank, ranks).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % SAVE_EVERY == 0:
            _save(model, optimizer, folder / "checkpoints", step)
        tell(step, time.time() - started)


def _state(model: Any, optimizer: Any) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def _save(model: Any, optimizer: Any, folder: Path, step: int) -> None:
    dcp.save(_state(model, optimizer), checkpoint_id=folder / f"{step:08d}")
    if dist.get_rank() == 0:
        (folder / f"{step:08d}" / "whole").touch()


def _load(model: Any, optimizer: Any, folder: Path) -> int:
    """The newest checkpoint that is whole on every rank; returns its step, 0 when there is none."""
    steps = sorted(int(path.parent.name) for path in folder.glob("*/whole"))
    newest = torch.tensor(steps[-1] if steps else 0)
    dist.broadcast(newest, 0)
    if step := int(newest):
        state = _state(model, optimizer)
        dcp.load(state, checkpoint_id=folder / f"{step:08d}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return step
