"""What an accelerator holds, computes and sends. Every number is per accelerator; ``hardware_table`` has those known.

Peaks are dense (without structured sparsity), bandwidths in one direction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from elastic_train.config.job import Job


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator and its share of the node that it sits in."""

    name: str
    memory_bytes: int
    """what torch can allocate of it, before anything is allocated; of CPUs, whose ranks share cores, of the node"""
    peak_flops: dict[str, float] = field(hash=False)
    """precision -> dense FLOP/s of matrix products; fp32 without TF32, which the engine leaves off"""
    memory_bytes_per_second: float
    link_bytes_per_second: float
    """to the other accelerators of the node"""
    network_bytes_per_second: float
    """to other nodes: its share of the node's network cards"""
    host_link_bytes_per_second: float
    """to the memory of its CPU"""
    host_memory_bytes_per_second: float
    """its share of the memory bandwidth of the node's CPUs, which update offloaded weights"""
    link_latency_seconds: float
    """of one hop of a collective inside a node"""
    network_latency_seconds: float
    """of one hop between nodes"""
    per_node: int
    """accelerators of one node"""
    efficiency: float
    """share of the peak that the operations of a training step reach while nothing waits: calibration replaces it"""
    host_memory_bytes: int = 2**40
    """of a node: that of its CPUs, for offloaded state"""
    fp8_share: float = 0.7
    """share of ``efficiency`` that products in fp8 reach: inputs are scaled and cast around them"""
    transfer_efficiency: float = 0.8
    """share of its memory, link and network bandwidth that is reached"""
    masked_attention: float = 0.5
    """share of ``efficiency`` that attention reaches under a mask, for which torch has no flash kernel"""
    launch_seconds: float = 0.0
    """what the processor takes to launch the kernels of a block in one direction: a block takes no less"""
    collective_shares: dict[str, float] = field(default_factory=dict, hash=False)
    """collective -> share of that bandwidth which it reaches, where it is not all of it"""
    exchange_seconds: float = 0.0
    """what an exchange takes beside its bytes and hops: its call, and copies into and out of its buffer (CPU)"""
    block_seconds: float = 0.0
    """what a block costs in one direction beside its operations, whatever its size: launches, Python"""
    computing_at_once: int | None = None
    """how many of a node compute at full speed at the same time; None: all (CPU ranks share cores)"""
    mesh: bool = False
    """whether each has a link to each other of the node, of which a group can only use those among its ranks"""
    overlaps: bool = True
    """whether collectives run beside compute"""
    sources: dict[str, str] | None = field(default=None, hash=False)
    """field -> where its number comes from"""

    def peak(self, precision: str) -> float:
        """Dense FLOP/s. Raises ValueError for a precision that it has no units for."""
        if precision not in self.peak_flops:
            have = ", ".join(self.peak_flops)
            raise ValueError(f"{self.name} has no {precision} units; it computes in {have}")
        return self.peak_flops[precision]

    def with_threads(self, threads: int, ranks: int) -> Accelerator:
        """A CPU, whose numbers are of one thread, as each of ``ranks`` has it with ``threads``.

        Assumed: so many threads compute, and read memory, so many times as fast, as long as there are cores for them.
        What is done by Python, and exchanges, take as long.
        """
        cores = math.inf if self.computing_at_once is None else self.computing_at_once / min(ranks, self.per_node)
        factor = max(1.0, min(threads, cores))
        if factor == 1.0:
            return self
        return replace(
            self,
            peak_flops={precision: peak * factor for precision, peak in self.peak_flops.items()},
            memory_bytes_per_second=self.memory_bytes_per_second * factor,
        )

    def for_job(self, job: Job, ranks: int) -> Accelerator:
        """As the trainers of ``job`` use it, ``ranks`` of them: ``hosts.threads`` matter on CPUs."""
        return self.with_threads(job.hosts.threads, ranks) if job.hosts.device == "cpu" else self

    def link_between(self, ranks: int) -> float:
        """Bytes per second that one of ``ranks`` of a node sends to the others."""
        if not self.mesh or self.per_node == 1:
            return self.link_bytes_per_second
        return self.link_bytes_per_second * max(1, ranks - 1) / (self.per_node - 1)

    def memory_for(self, ranks: int) -> int:
        """Bytes that each of ``ranks`` may have."""
        return self.memory_bytes // (1 if self.computing_at_once is None else min(ranks, self.per_node))

    def sharing(self, ranks: int) -> float:
        """How many ranks share one computing unit when ``ranks`` of them run: 1 where each has its own."""
        here = min(ranks, self.per_node)
        return 1.0 if self.computing_at_once is None else max(1.0, here / self.computing_at_once)
