"""The keys of a job's whole state: a function of the job file, the same for every layout and rank."""

from __future__ import annotations

from elastic_train.config.job import Job
from elastic_train.model.lora import apply_lora
from elastic_train.model.transformer import Transformer
from elastic_train.parallel.stages import stages_of
from elastic_train.training.ema import KIND
from elastic_train.training.optimizer import state_kinds


def state_keys(job: Job) -> frozenset[str]:
    """What the ranks of any layout have in ``Engine.state`` together; any other key is of another job."""
    model = Transformer(job.model, layers=range(job.model.num_hidden_layers), first=True, last=True)
    apply_lora(model, job.lora)
    stages = stages_of([model])
    trained = set(stages.trained)
    averages = [KIND] if job.training.ema_decay is not None else []
    return frozenset(
        f"{kind}.{name}"
        for name, shape in stages.shapes.items()
        for kind in ["param", *([*state_kinds(job.optimizer, name, len(shape)), *averages] if name in trained else ())]
    )
