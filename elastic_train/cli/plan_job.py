"""``elastic-train plan --write-job``: a layout of the answer as a job file, with room to lose hosts."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic_train.cli.plan_question import Question
    from elastic_train.config.job import Job
    from elastic_train.config.layout import Layout
    from elastic_train.planner.ranking import Candidate


def job_text(plan: Candidate, question: Question) -> str:
    """YAML."""
    import yaml

    values = job_of(plan, question).model_dump(mode="json", exclude_unset=True)
    head = f"# Planned for {plan.layout} on {question.gpus} hosts: {plan.time.total:.4g} s a step is the estimate.\n"
    return head + yaml.safe_dump(values, sort_keys=False, width=120)


def job_of(plan: Candidate, question: Question) -> Job:
    """The job with its options. The data axis is ``auto``, and ``hosts.min`` the least on which the rest still fits."""
    axis = "dp_replicate" if plan.job.parallel.data in ("ddp", "hsdp") else "dp_shard"
    hosts = plan.job.hosts.model_copy(
        update={
            "min": _fewest(plan, axis, question),
            "max": question.gpus,
            "memory": f"{question.memory_limit // 2**20}MiB",
        }
    )
    parallel = plan.job.parallel.model_copy(update={axis: "auto"})
    return plan.job.model_copy(update={"hosts": hosts, "parallel": parallel})


def _fewest(plan: Candidate, axis: str, question: Question) -> int:
    """Hosts of the narrowest layout along ``axis`` that fits."""
    from dataclasses import replace

    from elastic_train.planner.constraints import check_layout
    from elastic_train.planner.host_memory import host_problem
    from elastic_train.planner.memory import memory_bytes

    def narrow(size: int) -> Layout:
        return replace(plan.layout, **{axis: size})

    def fits(size: int) -> bool:
        layout = narrow(size)
        if check_layout(plan.job, layout) or host_problem(plan.job, layout, question.accelerator):
            return False
        return memory_bytes(plan.job, layout) <= question.memory_limit

    widest = getattr(plan.layout, axis)
    size = 1 + bisect.bisect_left(range(1, widest), True, key=fits)
    return narrow(size).world_size
