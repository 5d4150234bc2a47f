"""What ``validate`` and ``--dry-run`` print: the resolved job as YAML, the layouts and the batch equation as comments.

The whole output is again a valid job file.
"""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.training import TrainingConfig
from elastic_train.planner.layouts import choose_layout


def resolved(job: Job) -> str:
    """YAML of every field, defaults included, followed by comment lines."""
    text = yaml.safe_dump(job.as_dict(), sort_keys=False, width=120)
    return text + "\n" + "\n".join(f"# {line}" for line in summary(job)) + "\n"


def summary(job: Job) -> Iterator[str]:
    """Parameters, tokens, and the layout for the most and the fewest hosts."""
    tokens = job.training.global_batch * job.data.sequence_length
    yield f"parameters: {job.model.num_parameters:,}"
    yield (
        f"tokens per step: global_batch {job.training.global_batch} x sequence_length {job.data.sequence_length} "
        f"= {tokens:,}; {job.training.steps:,} steps = {tokens * job.training.steps:,} tokens"
    )
    for hosts in dict.fromkeys((job.hosts.max, job.hosts.min)):
        choice = choose_layout(job, hosts)
        yield f"on {hosts} host{'' if hosts == 1 else 's'}: layout {choice.layout} ({'; '.join(choice.reasons)})"
        yield f"  {batch_equation(job.training, choice.layout)}"


def batch_equation(training: TrainingConfig, layout: Layout) -> str:
    """How the user's global batch is cut, e.g. ``global_batch 8 = micro_batch 1 x accumulation 4 x data ranks 2``."""
    ranks = layout.data_ranks
    share, extra = divmod(training.slots, ranks)
    if not extra:
        return (
            f"global_batch {training.global_batch} = micro_batch {training.micro_batch} x accumulation {share} "
            f"x data ranks {ranks}"
        )
    return (
        f"global_batch {training.global_batch} = micro_batch {training.micro_batch} x {training.slots} slots, uneven "
        f"over data ranks {ranks}: {extra} with accumulation {share + 1}, {ranks - extra} with {share} + 1 padding"
    )
