"""How much the resident memory of a rank grows while it trains."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.training.engine import Engine
from tests.training.synthetic import SyntheticBatches

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""


def growth(rank: int, small: Job, job: Job, layout: Layout) -> int:
    """Bytes by which the peak of three steps of ``job`` is above what the process had after steps of ``small``.

    Those load what a first step loads. glibc gives back what is freed: what it would keep is another question.
    """
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    libc.mallopt(M_TRIM_THRESHOLD, 128 * 1024)
    _train(small, layout, rank)
    gc.collect()
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
    before = _kilobytes("VmRSS")
    _train(job, layout, rank)
    return (_kilobytes("VmHWM") - before) * 1024


def _train(job: Job, layout: Layout, rank: int) -> None:
    engine = Engine(job, layout, rank, SyntheticBatches(job))
    engine.initialize()
    for step in (1, 2, 3):
        engine.train_step(step)


def _kilobytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])
