"""The messages of a small job, and a look at what MLflow has of it."""

from __future__ import annotations

import math
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run

METRICS = ("loss", "grad_norm", "lr", "tokens_per_second", "step_seconds")


def job_message(name: str = "job", **fields: Any) -> dict[str, Any]:
    return {"type": "job", "name": name, "params": {"training.steps": 5}, **fields}


def generation_message(number: int, cause: str = "start", **fields: Any) -> dict[str, Any]:
    return {
        "type": "generation",
        "generation": number,
        "layout": "pp2 x dp_shard2",
        "hosts": 4,
        "cause": cause,
        "step": 0,
        **fields,
    }


def step_message(step: int, loss: float | None = None) -> dict[str, Any]:
    value = 5.0 / step if loss is None else loss
    metrics = dict.fromkeys(METRICS, 1.0) | {"loss": value}
    return {"type": "step", "step": step, "metrics": metrics, "time": 1_700_000_000.0 + step}


class Recorded:
    """The runs of one experiment."""

    def __init__(self, uri: str, experiment: str) -> None:
        self.client = MlflowClient(tracking_uri=uri)
        found = self.client.get_experiment_by_name(experiment)
        assert found is not None
        runs = list(self.client.search_runs([found.experiment_id], max_results=1000))
        self.parents: list[Run] = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
        children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
        self.children: list[Run] = sorted(children, key=lambda run: int(run.data.tags["elastic_train.generation"]))

    @property
    def parent(self) -> Run:
        (run,) = self.parents
        return run

    def history(self, metric: str, run: Run | None = None) -> list[tuple[int, float]]:
        """(step, value) of every stored point, by step."""
        points = self.client.get_metric_history((run or self.parent).info.run_id, metric)
        return sorted(
            ((point.step, point.value) for point in points), key=lambda point: (point[0], math.isnan(point[1]))
        )
