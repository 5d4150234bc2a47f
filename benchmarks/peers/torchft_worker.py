"""One replica (a group of one rank) of torchft's fault tolerant data parallelism. Arguments: the folder, its number."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from benchmarks.peers.work import loss_of, make_model, teller

TIMEOUT = timedelta(seconds=5)
"""Of collectives and of all else, as short as steps of 1 s on a busy machine allow."""


def main(folder: Path, replica: int) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model: Any = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=TIMEOUT,
        replica_id=f"replica{replica}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    parallel, managed, tell = DistributedDataParallel(manager, model), Optimizer(manager, optimizer), teller(folder)
    while True:
        started, before = time.time(), manager.current_step()
        managed.zero_grad()
        ranks = max(manager.num_participants(), 1)
        loss_of(parallel, before, (manager.participating_rank() or 0) % ranks, ranks).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        managed.step()
        if manager.current_step() > before:
            tell(manager.current_step(), time.time() - started)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
