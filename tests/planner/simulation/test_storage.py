from __future__ import annotations

import pytest

from elastic_train.cli.simulate_asked import Asked
from elastic_train.cli.simulate_question import LLAMA3_CHECKPOINT, asked_of
from elastic_train.config.optimizer import OptimizerConfig
from elastic_train.config.presets import PRESETS
from elastic_train.config.sizes import parse_size
from elastic_train.planner.simulation.storage import Storage, checkpoint_bytes
from tests.training.synthetic import small_job


def test_seconds_are_bytes_over_bandwidth() -> None:
    storage = Storage(nbytes=96e9, write=2e9, read=12e9)
    assert (storage.save_seconds, storage.load_seconds) == (48.0, 8.0)


@pytest.mark.parametrize(
    ("optimizer", "training", "each"),
    [
        ({}, {}, 12),
        ({}, {"precision": "bf16"}, 12),
        ({"name": "sgd", "momentum": 0.0}, {}, 4),
        ({"name": "sgd", "momentum": 0.9}, {}, 8),
        ({"name": "lion"}, {}, 8),
        ({}, {"ema_decay": 0.99}, 16),
    ],
)
def test_bytes_of_a_checkpoint(optimizer: dict[str, object], training: dict[str, object], each: int) -> None:
    """float32 weights, what the optimizer keeps of them, their average."""
    given = OptimizerConfig.model_validate({"learning_rate": 1e-3, **optimizer})
    job = small_job(training=training).model_copy(update={"optimizer": given})
    assert checkpoint_bytes(job) == each * job.model.num_parameters


def test_llama_3_has_12_bytes_a_parameter() -> None:
    parameters = small_job(model=PRESETS["llama3-405b"]).model.num_parameters
    assert parse_size(LLAMA3_CHECKPOINT) == pytest.approx(12 * parameters, rel=1e-3)


def test_a_checkpoint_takes_as_long_as_its_bytes() -> None:
    """840 GB at 10 GB/s; without rates at 164 and 929 MB/s of each of 64 hosts."""
    asked = Asked(nodes=8, checkpoint_size="840GB", storage_write="10GB/s", storage_read="42GB/s")
    question = asked_of(asked)
    (case,) = question.cases
    assert (case.scenario.saves.seconds, case.scenario.costs.load) == (84.0, 20.0)
    assert "840.0 GB, committed 84 s after they begin (10.0 GB/s), read in 20 s (42.0 GB/s)" in " ".join(question.notes)
    (case,) = asked_of(Asked(nodes=8, checkpoint_size="840GB")).cases
    assert case.scenario.saves.seconds == pytest.approx(840e9 / 64 / 164e6)
    assert case.scenario.costs.load == pytest.approx(840e9 / 64 / 929e6)


def test_what_nobody_said_is_told() -> None:
    told = " ".join(asked_of(Asked(nodes=8)).notes)
    for sentence in (
        "assumed: 10.0 GB a host (--checkpoint-size)",
        "164 MB/s a host to write and 929 MB/s a host to read are those of one host",
        "assumed: --step 10s, --replace 1h",
    ):
        assert sentence in told
    given = Asked(nodes=8, step=5.0, replace="2h", checkpoint_size="1TB", storage_write="1TB/s", storage_read="1TB/s")
    assert "assumed" not in " ".join(asked_of(given).notes[1:])


def test_a_save_that_is_longer_than_the_interval_puts_the_next_one_off() -> None:
    (case,) = asked_of(Asked(nodes=1, checkpoint_size="10TB", storage_write="1GB/s")).cases
    assert (case.scenario.saves.every, case.scenario.saves.seconds) == (10_000.0, 10_000.0)


def test_a_stall_is_part_of_the_save() -> None:
    (case,) = asked_of(Asked(nodes=1, checkpoint_size="1GB", storage_write="1GB/s", checkpoint_stall=7.0)).cases
    assert (case.scenario.saves.stall, case.scenario.saves.seconds) == (7.0, 7.0)


@pytest.mark.parametrize(("precision", "each"), [("fp32", 4), ("bf16", 2)])
def test_frozen_weights_are_saved_as_they_compute(precision: str, each: int) -> None:
    job = small_job(lora={"rank": 8}, training={"precision": precision})
    adapters = 4 * 8 * ((64 + 64) + (64 + 32))
    assert checkpoint_bytes(job) == each * job.model.num_parameters + 12 * adapters
