"""Runs one piece of work in forked processes and measures wall time, CPU seconds and memory of them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.005

Work = Callable[[], Any]
"""What is measured. A function that it returns is called afterwards, unmeasured, and gives the result."""
Prepare = Callable[[], Work]
"""Runs in the forked process, unmeasured, and gives the work."""


@dataclass(frozen=True, slots=True)
class Measured:
    """``seconds`` from the first start to the last end; ``cpu`` and ``peak_mib`` per process; the works' results."""

    seconds: float
    cpu: list[float]
    peak_mib: list[float]
    """Private memory (neither files nor shared memory) beyond what the process had before the work, at most."""
    results: list[Any]


def measure(prepares: Sequence[Prepare]) -> Measured:
    """Forks a process for each of ``prepares``; their work begins together. Raises RuntimeError when one fails."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in prepares]
    processes = [
        context.Process(target=_serve, args=(prepare, pipe[1])) for prepare, pipe in zip(prepares, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    ours = [pipe[0] for pipe in pipes]
    for connection in ours:
        _receive(connection)
    before = [_private_mib(process.pid) for process in processes]
    for connection in ours:
        connection.send("go")
    peaks = list(before)
    waiting = set(range(len(ours)))
    while waiting:
        for index in list(waiting):
            peaks[index] = max(peaks[index], _private_mib(processes[index].pid))
            if ours[index].poll():
                waiting.remove(index)
        time.sleep(POLL_SECONDS)
    answers = [_receive(connection) for connection in ours]
    for connection, process in zip(ours, processes, strict=True):
        connection.send("end")
        process.join()
    return Measured(
        seconds=max(answer["end"] for answer in answers) - min(answer["begin"] for answer in answers),
        cpu=[answer["cpu"] for answer in answers],
        peak_mib=[peak - first for peak, first in zip(peaks, before, strict=True)],
        results=[answer["result"] for answer in answers],
    )


def cpu_seconds() -> float:
    """User and system time of this process."""
    times = os.times()
    return times.user + times.system


def _serve(prepare: Prepare, connection: Connection) -> None:
    try:
        work = prepare()
        ctypes.CDLL(None).malloc_trim(0)  # room that preparing has left would hide what the work takes
        connection.send({})
        connection.recv()
        begin, cpu = time.perf_counter(), cpu_seconds()  # one clock for all processes of a machine
        result = work()
        end, used = time.perf_counter(), cpu_seconds() - cpu
        result = result() if callable(result) else result
        connection.send({"begin": begin, "end": end, "cpu": used, "result": result})
    except BaseException:
        connection.send({"error": traceback.format_exc()})
    connection.recv()  # the memory is looked at until then


def _receive(connection: Connection) -> dict[str, Any]:
    answer: dict[str, Any] = connection.recv()
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer


def _private_mib(pid: int | None) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return 0.0  # it has ended; what it sent says why
