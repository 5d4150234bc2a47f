"""``training.compile``: the computation of every block goes through ``torch.compile``."""

from __future__ import annotations

import importlib.util
import os
import shutil

import torch

from elastic_train.model.transformer import Transformer


def apply_compile(model: Transformer, device: torch.device) -> None:
    """Replace ``forward`` of the blocks, in place; code is made when it first runs.

    All blocks share it. Hooks of sharding and progress are called around it, eagerly. Attention cores are left out:
    they are one kernel already, exchange tokens with other ranks or are computed twice. Raises ValueError without the
    compiler that the device needs.
    """
    problem = _missing_compiler(device)
    if problem is not None:
        raise ValueError(problem)
    for block in model.blocks.values():
        core = block.get_submodule("self_attn.core")
        core.forward = torch.compiler.disable(core.forward)  # type: ignore[no-untyped-call]
        block.forward = torch.compile(block.forward)


def _missing_compiler(device: torch.device) -> str | None:
    if device.type == "cpu":
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            return (
                f"training.compile=true needs a C++ compiler on cpu, and {compiler!r} is not there: install g++, name "
                "one in the environment variable CXX, or use training.compile=false"
            )
    elif importlib.util.find_spec("triton") is None:
        return f"training.compile=true needs triton on {device.type}: install it, or use training.compile=false"
    return None
