"""What ``validate`` and ``--dry-run`` print: the resolved job as YAML, the layouts and the batch equation as comments.

The whole output is again a valid job file.
"""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.planner.constraints import micro_batches_per_rank
from elastic_train.planner.hardware_table import host_of
from elastic_train.planner.layouts import choose_layout
from elastic_train.planner.parameters import adapter_elements


def resolved(job: Job) -> str:
    """YAML of every field, defaults included, followed by comment lines."""
    text = yaml.safe_dump(job.as_dict(), sort_keys=False, width=120)
    return text + "\n" + "\n".join(f"# {line}" for line in summary(job)) + "\n"


def summary(job: Job) -> Iterator[str]:
    """Parameters, tokens, and the layout for the most and the fewest hosts."""
    tokens = job.training.global_batch * job.data.sequence_length
    yield f"parameters: {parameter_count(job)}"
    yield (
        f"tokens per step: global_batch {job.training.global_batch} x sequence_length {job.data.sequence_length} "
        f"= {tokens:,}; {job.training.steps:,} steps = {tokens * job.training.steps:,} tokens"
    )
    if job.hosts.device == "cuda":
        limit = "with no limit of memory" if job.hosts.memory is None else f"with hosts.memory={job.hosts.memory}"
        yield f"assumed until hosts join and tell what they are: {host_of('cuda').name}, {limit}"
    for hosts in dict.fromkeys((job.hosts.max, job.hosts.min)):
        choice = choose_layout(job, hosts)
        yield f"on {hosts} host{'' if hosts == 1 else 's'}: layout {choice.layout} ({'; '.join(choice.reasons)})"
        yield f"  {batch_equation(job, choice.layout)}"


def parameter_count(job: Job) -> str:
    """``8,030,261,248``, or ``8,030,261,248 frozen + 3,407,872 trained``."""
    if job.lora is None:
        return f"{job.model.num_parameters:,}"
    return f"{job.model.num_parameters:,} frozen + {adapter_elements(job.model, job.lora):,} trained"


def batch_equation(job: Job, layout: Layout) -> str:
    """How the user's global batch is cut, e.g. ``global_batch 8 = micro_batch 1 x accumulation 4 x data ranks 2``."""
    training, ranks, count = job.training, layout.data_ranks, micro_batches_per_rank(job, layout)
    padding = ranks * count - training.slots
    batch = f"global_batch {training.global_batch} = micro_batch {training.micro_batch}"
    if not padding:
        return f"{batch} x accumulation {count} x data ranks {ranks}"
    return (
        f"{batch} x {training.slots} slots, over data ranks {ranks} with accumulation {count}: "
        f"{padding} of {ranks * count} micro-batches are padding"
    )
