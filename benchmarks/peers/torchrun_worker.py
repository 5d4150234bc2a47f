"""One rank under ``torchrun --max-restarts``. Argument: the folder for lines and checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from benchmarks.peers.work import train_fsdp

if __name__ == "__main__":
    dist.init_process_group("gloo")
    train_fsdp(Path(sys.argv[1]))
