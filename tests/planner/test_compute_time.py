"""The roofline of a micro-batch, against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.presets import PRESETS
from elastic_train.planner.compute_time import PassTimes, pass_times
from elastic_train.planner.hardware_table import accelerator
from tests.training.synthetic import small_job

H100 = replace(accelerator("h100-80gb"), transfer_efficiency=1.0)
SINGLE = Layout()
SPEED = H100.peak("bf16") * H100.efficiency
FREE_MEMORY = replace(H100, memory_bytes_per_second=1e30, launch_seconds=0.0)
ENDLESS_SPEED = replace(H100, peak_flops={"bf16": 1e30}, launch_seconds=0.0)


def llama(sequence: int = 8192, mask: bool = False, **more: dict[str, Any]) -> Job:
    training = {"precision": "bf16", "global_batch": 64, **more.pop("training", {})}
    data = {"sequence_length": sequence, "document_mask": mask}
    return small_job(model=PRESETS["llama3-8b"], data=data, training=training, **more)


def times(job: Job, layout: Layout = SINGLE, chip: Any = H100) -> PassTimes:
    return pass_times(job, layout, chip, chip.efficiency)


WEIGHTS = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
"""Of the matrices of a block of Llama 3 8B."""


def test_few_tokens_wait_for_the_weights_of_a_block() -> None:
    """16 tokens: 7 GFLOP are 17 microseconds, 436 MB of weights 130."""
    short = times(llama(16), chip=replace(H100, launch_seconds=0.0))
    assert short.forward > 2 * WEIGHTS / H100.memory_bytes_per_second > 5 * 2 * 16 * WEIGHTS / SPEED
    assert short.forward == pytest.approx(2 * WEIGHTS / H100.memory_bytes_per_second, rel=0.03)
    assert short.forward == pytest.approx(times(llama(16), chip=ENDLESS_SPEED).forward)


def test_many_tokens_wait_for_products_and_what_is_none_waits_for_memory() -> None:
    long, chip = times(llama()), replace(H100, launch_seconds=0.0)
    products = (2 * 8192 * WEIGHTS + 4 * 4096 * 8192 * 8193 / 2) / SPEED
    assert times(llama(), chip=FREE_MEMORY).forward == pytest.approx(products)
    # Two norms and two sums; 36 bytes for each of q and k, rotated in float32; five numbers for each of the inner size.
    moved = 2 * 8192 * (10 * 4096 + 18 * (4096 + 1024) + 5 * 14336) / H100.memory_bytes_per_second
    assert long.forward == pytest.approx(products + moved)
    compiled = times(llama(training={"compile": True}), chip=chip)
    fused = 2 * 8192 * (10 * 4096 + 2 * (4096 + 1024) + 3 * 14336) / H100.memory_bytes_per_second
    assert compiled.forward == pytest.approx(products + fused)


def test_a_block_takes_no_less_than_its_launches() -> None:
    tiny = small_job(data={"sequence_length": 32}, training={"precision": "bf16"})
    found = times(tiny)
    assert found.forward == found.backward == H100.launch_seconds > 0
    assert found.again == 0.0


def test_tensor_ranks_read_all_tokens() -> None:
    """What is gathered is read whole by each rank, so eight of them need more than an eighth of the traffic."""
    one, eight = (times(llama(), Layout(tp=tp), ENDLESS_SPEED).forward for tp in (1, 8))
    assert 1.3 / 8 < eight / one < 2.5 / 8
    one, eight = (times(llama(), Layout(tp=tp), FREE_MEMORY).forward for tp in (1, 8))
    assert eight == pytest.approx(one / 8)


@pytest.mark.parametrize(
    ("mask", "context", "cp", "pairs", "masked"),
    [
        (False, "gather", 1, 8192 * 8193 / 2, False),
        (True, "gather", 1, 8192**2, True),
        # 2 chunks of 1,024 queries see 9 x 1,024 keys together
        (False, "gather", 4, 9 * 1024**2, True),
        (True, "gather", 4, 9 * 1024**2, True),
        (False, "ulysses", 4, 8192 * 8193 / 2 / 4, False),
        (True, "ulysses", 4, 8192**2 / 4, True),
    ],
)
def test_attention_under_masks(mask: bool, context: str, cp: int, pairs: float, masked: bool) -> None:
    found = times(llama(mask=mask, parallel={"context": context}), Layout(cp=cp), FREE_MEMORY)
    products = 2 * 8192 * WEIGHTS / cp / SPEED
    attention = 4 * 4096 * pairs / (SPEED * (H100.masked_attention if masked else 1.0))
    assert found.forward == pytest.approx(products + attention)
    assert found.backward == pytest.approx(2 * products + 2.5 * attention)


def test_recomputation() -> None:
    kinds = {
        kind: times(llama(training={"recompute": kind}), chip=FREE_MEMORY) for kind in ("none", "selective", "full")
    }
    attention = 4 * 4096 * 8192 * 8193 / 2 / SPEED
    last = 2 * 8192 * 4096 * 14336 / SPEED
    assert kinds["none"].again == 0.0
    assert kinds["selective"].again == pytest.approx(attention)
    assert kinds["full"].again == pytest.approx(kinds["none"].forward - last)


def test_units_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="a100-80gb has no fp8 units"):
        times(llama(training={"precision": "fp8"}, hosts={"device": "cuda"}), chip=accelerator("a100-80gb"))
