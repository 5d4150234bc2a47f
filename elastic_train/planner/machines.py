"""What the hosts of a job are, as far as they tell: the kind of accelerator, what it holds, and their nodes' memory."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from elastic_train.config.job import Job
from elastic_train.config.sizes import gib
from elastic_train.planner.hardware import Accelerator
from elastic_train.planner.hardware_table import accelerators, host_of

_NAMES = {
    r"(NVIDIA )?A100-SXM4-40GB": "a100-40gb",
    r"(NVIDIA )?A100-SXM4-80GB": "a100-80gb",
    r"(NVIDIA )?H100 80GB HBM3": "h100-80gb",
    r"(NVIDIA )?H200": "h200",
    r"(NVIDIA )?B200": "b200",
    r"AMD Instinct MI300X( .*)?": "mi300x",
}
"""Names as drivers tell them -> those of the table. Not those on PCIe cards or of parts of one: they are slower."""
_UNUSABLE = 2**30
"""Of what a driver tells of a GPU's memory torch can allocate 0.5 to 1 GiB less."""


@dataclass(frozen=True, slots=True)
class Told:
    """By one host. ``name`` and ``memory_bytes``: of its GPU; ``node_bytes``: CPU memory of its node. None: unknown."""

    name: str | None = None
    memory_bytes: int | None = None
    node_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """What layouts are planned for. ``memory_bytes``: of one host; None: no limit is known. ``said``: sentences."""

    accelerator: Accelerator
    memory_bytes: int | None = None
    said: tuple[str, ...] = ()


def known_accelerator(name: str) -> Accelerator | None:
    """Of the table, by the name that a driver tells; None: it is not there."""
    found = (kind for pattern, kind in _NAMES.items() if re.fullmatch(pattern, name))
    return next((accelerators()[kind] for kind in found), None)


def machine_of(job: Job, told: Iterable[Told], largest_node: int) -> Machine:
    """The slowest, and the smallest, of what the hosts say they are; ``largest_node``: hosts on the fullest node."""
    hosts = dict.fromkeys(told)
    sizes = [host.node_bytes for host in hosts if host.node_bytes is not None]
    if job.hosts.device == "cpu":
        chip = host_of("cpu", largest_node)
        return Machine(chip, min(sizes) // largest_node if sizes else None)
    found = [_one(host) for host in hosts] or [_one(Told())]
    slowest = min((each.accelerator for each in found), key=lambda chip: chip.peak_flops["bf16"] * chip.efficiency)
    chip = replace(slowest, per_node=max(1, min(slowest.per_node, largest_node)))
    if sizes:
        chip = replace(chip, host_memory_bytes=min(sizes))
    limits = [each.memory_bytes for each in found if each.memory_bytes is not None]
    said = dict.fromkeys(sentence for each in found for sentence in each.said)
    return Machine(chip, min(limits, default=None), tuple(said))


def _one(host: Told) -> Machine:
    assumed = host_of("cuda")
    if host.name is None:
        return Machine(assumed, None, (f"hosts do not tell what GPUs they have: speeds of {assumed.name} are assumed",))
    if (known := known_accelerator(host.name)) is not None:
        most = known.memory_bytes if host.memory_bytes is None else min(known.memory_bytes, host.memory_bytes)
        return Machine(known, most, (f"{host.name}: planned as {known.name} with {gib(most)}",))
    limit = None if host.memory_bytes is None else max(0, host.memory_bytes - _UNUSABLE)
    memory = "no limit of memory is known" if limit is None else f"its memory is taken as {gib(limit)}"
    return Machine(assumed, limit, (f"{host.name} is not known: speeds of {assumed.name} are assumed, {memory}",))
