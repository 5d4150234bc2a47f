"""A layout with its options, and what its fullest rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.sizes import gib
from elastic_train.planner.memory import RankMemory


@dataclass(frozen=True, slots=True)
class Held:
    """A layout with its options written into ``job``, and what its fullest rank holds."""

    job: Job
    layout: Layout
    fullest: RankMemory

    @property
    def options(self) -> dict[str, str | int | bool]:
        """What was chosen beside the axes. The schedule only where there is one."""
        parallel, training = self.job.parallel, self.job.training
        chosen: dict[str, str | int | bool] = {"data": parallel.data}
        if parallel.data in ("zero3", "hsdp"):
            chosen["reshard_after_forward"] = parallel.reshard_after_forward
        chosen |= {"micro_batch": training.micro_batch, "recompute": training.recompute}
        if self.layout.cp > 1:
            chosen["context"] = parallel.context
        if self.layout.pp > 1:
            chosen["pipeline"] = parallel.pipeline
            if parallel.stages_per_rank > 1:
                chosen["virtual_stages"] = parallel.virtual_stages
        return chosen

    def too_much(self, limit: int) -> str:
        """That it does not fit, and its biggest term."""
        term, size = max(self.fullest.terms.items(), key=lambda item: item[1])
        chosen = ", ".join(f"{name}={_yaml(value)}" for name, value in self.options.items())
        return (
            f"{self.layout} ({chosen}) needs {gib(self.fullest.total)} of {gib(limit)}; its biggest term is {term} "
            f"with {gib(size)}"
        )


def _yaml(value: str | int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
