"""What a host tells of its machine when it joins: the memory of its node, and what its GPU is. Without torch."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Mapping
from typing import Any

import psutil

from elastic_train.controller.memory_limit import MemoryCgroup
from elastic_train.planner.machines import Told

logger = logging.getLogger(__name__)
_PATIENCE_SECONDS = 20.0


def machine_facts(device: str) -> dict[str, Any]:
    """JSON-ready fields of ``Told``. May take seconds where ``device`` is cuda: the driver is asked."""
    name, memory = _gpu() if device == "cuda" else (None, None)
    return {"name": name, "memory_bytes": memory, "node_bytes": node_bytes()}


def node_bytes() -> int:
    """CPU memory of this node, or of this process's cgroup where that may use less."""
    cgroup = MemoryCgroup.of_this_process()
    use = cgroup.read() if cgroup is not None else None
    total = int(psutil.virtual_memory().total)
    return total if use is None or use.limit is None else min(total, use.limit)


def told(facts: object) -> Told:
    """From what came with a message; of a host that does not say, nothing is known."""
    if not isinstance(facts, Mapping):
        return Told()
    name, memory, node = (facts.get(field) for field in ("name", "memory_bytes", "node_bytes"))
    return Told(
        name if isinstance(name, str) else None,
        memory if isinstance(memory, int) and memory > 0 else None,
        node if isinstance(node, int) and node > 0 else None,
    )


def _gpu() -> tuple[str | None, int | None]:
    """Name and bytes of the first GPU that is visible here, by ``nvidia-smi``; None where it cannot say."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    which = [f"--id={visible}"] if visible else []
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits", *which]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=True).stdout
        name, _, mebibytes = answer.splitlines()[0].rpartition(",")
        return name.strip(), int(mebibytes) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        logger.warning("nvidia-smi does not say what this host's GPU is: %s", error)
        return None, None
