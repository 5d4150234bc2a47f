"""Run as a program: forks processes that write snapshots without end, one after the other, until they are killed.

Each line on stdin (a folder) starts a writer, whose pid is printed; the next line is read when it is dead. Step s is a
state full of the value s, written into buffer s % 2, as a trainer does.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import torch

from elastic_train.checkpoint.capture import Capture
from elastic_train.checkpoint.image import Image, image_name
from elastic_train.parallel.shard import LocalShard


def write_for_ever(folder: Path) -> None:
    tensors = [torch.zeros(256, 1024) for _ in range(32)]
    capture = Capture({f"w{i}": LocalShard(tensor, (256, 1024), (0, 0)) for i, tensor in enumerate(tensors)})
    images = [Image.create(folder / image_name(1, 0, b), 1, 0, capture.description) for b in range(2)]
    print(os.getpid(), flush=True)
    for step in itertools.count(1):
        torch._foreach_copy_(tensors, [torch.tensor(float(step))] * len(tensors))
        capture.write(images[step % 2], step)


def main() -> None:
    torch.set_num_threads(1)  # a forked process must not wait for threads that it does not have
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            write_for_ever(Path(line.strip()))
        os.waitpid(pid, 0)
        print("dead", flush=True)


if __name__ == "__main__":
    main()
