from __future__ import annotations

from typing import Any

import pytest

from elastic_train.config.data import DataConfig
from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.lora import LoraConfig
from elastic_train.config.model import ModelConfig
from elastic_train.config.optimizer import OptimizerConfig
from elastic_train.config.training import TrainingConfig
from elastic_train.training.state_keys import state_keys
from tests.ranks import run_ranks
from tests.training.state_ranks import keys_of_engines

MODEL = ModelConfig(
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=12,
    vocab_size=16,
)


def job(
    optimizer: dict[str, Any], ema_decay: float | None = None, tied: bool = False, lora: LoraConfig | None = None
) -> Job:
    return Job(
        lora=lora,
        init_from=None if lora is None else "unused",
        name="keys",
        model=MODEL.model_copy(update={"tie_word_embeddings": tied}),
        data=DataConfig(uri="unused", sequence_length=8),
        training=TrainingConfig(steps=1, global_batch=2, ema_decay=ema_decay),
        optimizer=OptimizerConfig.model_validate(optimizer),
    )


WEIGHTS = 1 + 2 * 9 + 1 + 1
JOBS = {
    "adamw": (job({"name": "adamw"}), 3 * WEIGHTS),
    "adam-ema": (job({"name": "adam"}, ema_decay=0.9), 4 * WEIGHTS),
    "lion": (job({"name": "lion"}), 2 * WEIGHTS),
    "sgd": (job({"name": "sgd", "momentum": 0.9}), 2 * WEIGHTS),
    "sgd-plain": (job({"name": "sgd", "momentum": 0.0}), WEIGHTS),
    "muon": (job({"name": "muon"}), WEIGHTS + 2 * 7 + 2 * (WEIGHTS - 2 * 7)),
    "lora": (job({"name": "adamw"}, lora=LoraConfig()), WEIGHTS + 2 * 2 * 2 * 3),
    "lora-ema": (job({"name": "lion"}, ema_decay=0.9, lora=LoraConfig()), WEIGHTS + 2 * 2 * 2 * 3),
    "tied": (job({"name": "adamw"}, tied=True), 3 * (WEIGHTS - 1)),
}


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2)], ids=str)
def test_the_keys_of_a_job_are_those_of_all_its_ranks(layout: Layout) -> None:
    jobs = [job for job, _ in JOBS.values()]
    for (job, count), ranks in zip(
        JOBS.values(), zip(*run_ranks(keys_of_engines, layout.world_size, jobs, layout), strict=True), strict=True
    ):
        assert set().union(*ranks) == state_keys(job)
        assert len(state_keys(job)) == count
