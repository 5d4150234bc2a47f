"""``elastic-train plan --write-job``: a layout of the answer as a job file, with room to lose hosts."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic_train.config.job import Job
    from elastic_train.config.layout import Layout
    from elastic_train.planner.search import Candidate


def job_text(plan: Candidate, gpus: int, memory_limit: int) -> str:
    """YAML."""
    import yaml

    values = job_of(plan, gpus, memory_limit).model_dump(mode="json", exclude_unset=True)
    head = f"# Planned for {plan.layout} on {gpus} hosts: {plan.time.total:.4g} s a step is the estimate.\n"
    return head + yaml.safe_dump(values, sort_keys=False, width=120)


def job_of(plan: Candidate, gpus: int, memory_limit: int) -> Job:
    """The job with its options. The data axis is ``auto``, and ``hosts.min`` the least on which the rest still fits."""
    axis = "dp_replicate" if plan.job.parallel.data in ("ddp", "hsdp") else "dp_shard"
    hosts = plan.job.hosts.model_copy(
        update={
            "min": _fewest(plan, axis, memory_limit),
            "max": gpus,
            "memory": f"{memory_limit // 2**20}MiB",
        }
    )
    parallel = plan.job.parallel.model_copy(update={axis: "auto"})
    return plan.job.model_copy(update={"hosts": hosts, "parallel": parallel})


def _fewest(plan: Candidate, axis: str, memory_limit: int) -> int:
    """Hosts of the narrowest layout along ``axis`` that fits."""
    from dataclasses import replace

    from elastic_train.planner.constraints import check_layout
    from elastic_train.planner.memory import memory_bytes

    def narrow(size: int) -> Layout:
        return replace(plan.layout, **{axis: size})

    def fits(size: int) -> bool:
        layout = narrow(size)
        return not check_layout(plan.job, layout) and memory_bytes(plan.job, layout) <= memory_limit

    widest = getattr(plan.layout, axis)
    size = 1 + bisect.bisect_left(range(1, widest), True, key=fits)
    return narrow(size).world_size
