"""Ray Train V2's own elastic restart. Arguments: the cluster's address, the folder, the fewest and the most workers."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig


def train(config: dict[str, Any]) -> None:
    from benchmarks.peers.work import train_fsdp

    train_fsdp(Path(config["folder"]))


if __name__ == "__main__":
    address, folder, fewest, most = sys.argv[1:]
    ray.init(address=address, log_to_driver=False)
    workers = int(most) if fewest == most else (int(fewest), int(most))
    with tempfile.TemporaryDirectory() as storage:
        TorchTrainer(
            train,
            train_loop_config={"folder": folder},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(name="peer", storage_path=storage, failure_config=FailureConfig(max_failures=-1)),
        ).fit()
