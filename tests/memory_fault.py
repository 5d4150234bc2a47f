"""A fault of memory, made from outside: a weight of a running trainer changes. Linux, needs ptrace rights."""

from __future__ import annotations

import os
import re
import signal
import struct
import time
from pathlib import Path

from elastic_train.checkpoint.description import Description
from elastic_train.checkpoint.errors import ImageError
from elastic_train.checkpoint.image import Image, State, description_path
from elastic_train.controller.control_block import ControlBlock

_PATTERN_BYTES = 64


def break_weight(pid: int, pool: Path, rank: int, tensor: str, beats_per_step: int, value: float) -> None:
    """Write ``value`` over all copies of the first weight of ``tensor`` in the memory of the trainer ``pid``.

    It happens in the first half of a step, when the snapshot of the step before is whole: where its bytes are still
    those in memory.
    """
    deadline = time.monotonic() + 60
    (path,) = pool.glob(f"g*-r{rank}.control")
    control = ControlBlock(str(path))
    try:
        while time.monotonic() < deadline:
            begun = _begin_of_a_step(control, deadline)
            while control.beats - begun < beats_per_step // 2:
                os.kill(pid, signal.SIGSTOP)
                try:
                    in_time = control.beats - begun < beats_per_step // 2
                    if in_time and _overwrite(pid, _bytes_of(pool, rank, tensor, control.started_step - 1), value):
                        return
                finally:
                    os.kill(pid, signal.SIGCONT)
                time.sleep(0.001)
    finally:
        control.close()
    raise AssertionError(f"found no moment in which {tensor} of rank {rank} could be broken")


def _begin_of_a_step(control: ControlBlock, deadline: float) -> int:
    """How many beats there have been when the next step begins."""
    step = control.started_step
    while control.started_step == step and time.monotonic() < deadline:
        time.sleep(0.0002)
    return control.beats


def _bytes_of(pool: Path, rank: int, tensor: str, step: int) -> bytes:
    """The first bytes of the rank's part of ``tensor`` after ``step``; none while its image is not whole."""
    found = b""
    for path in pool.glob(f"g*-r{rank:05d}-b*.img"):
        try:
            image = Image.open(path)
        except ImageError:
            continue
        if image.state == State.WHOLE and image.step == step:
            description = Description.from_json(description_path(path).read_text())
            (chunk,) = [chunk for chunk in description.chunks if chunk.key == tensor]
            found = bytes(image.data[chunk.byte_offset : chunk.byte_offset + _PATTERN_BYTES])
        image.close()
    return found


def _overwrite(pid: int, pattern: bytes, value: float) -> bool:
    places = _places(pid, pattern) if pattern else []
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for place in places:
            memory.seek(place)
            memory.write(struct.pack("<f", value))
    return bool(places)


def _places(pid: int, pattern: bytes) -> list[int]:
    """Where ``pattern`` is in the private writable memory of ``pid``."""
    places = []
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            region = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0\s*(\[heap\])?$", line)
            if region is None:
                continue
            begin, end = int(region[1], 16), int(region[2], 16)
            memory.seek(begin)
            data = memory.read(end - begin)
            places += [begin + found.start() for found in re.finditer(re.escape(pattern), data)]
    return places
