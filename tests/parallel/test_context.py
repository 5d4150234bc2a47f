"""Context parallelism: exchanges and attention on their own, and whole steps against one rank."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.parallel.context import held_chunks
from tests.model.test_attention import reference, seen_of
from tests.parallel.contexts import attention
from tests.ranks import run_ranks
from tests.training.runs import Run, assert_same_gradients, assert_same_steps, run
from tests.training.synthetic import small_job

# The fast tests cover this subject by the rows of test_parity.py.
pytestmark = pytest.mark.slow

KINDS = ["gather", "ulysses"]


def job(kind: str = "gather", *, documents: bool = False, **sections: Any) -> Job:
    model = {"num_attention_heads": 8, "num_key_value_heads": 4, **sections.pop("model", {})}
    return small_job(model=model, data={"document_mask": documents}, parallel={"context": kind}, **sections)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_token_is_held_once(kind: Any, ranks: int) -> None:
    places = [place for rank in range(ranks) for chunk in held_chunks(kind, 24, ranks, rank) for place in chunk]
    assert sorted(places) == list(range(24))


def test_gathering_is_the_same_work_for_all() -> None:
    """A query at place p sees p + 1 keys. With cp = 4, contiguous quarters would be 1, 3, 5 and 7 sixteenths."""
    assert held_chunks("gather", 64, 4, 1) == [range(8, 16), range(48, 56)]
    work = [sum(place + 1 for chunk in held_chunks("gather", 64, 4, rank) for place in chunk) for rank in range(4)]
    assert work == [64 * 65 // 2 // 4] * 4


DOCUMENTS = {
    "none": None,
    "chunk borders": [[0] * 6 + [1] * 6 + [2] * 12, [0] * 12 + [1] * 12],
    "single tokens and a long one": [[0] + [1] * 22 + [2], [0] * 24],
}


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize(("kind", "ranks"), [("gather", 2), ("gather", 3), ("gather", 4), ("ulysses", 2)])
def test_attention_and_its_gradients_equal_softmax(kind: str, ranks: int, documents: str) -> None:
    """6 query heads over 2 key/value heads that are all different; loss = sum(output x random weight)."""
    random = np.random.default_rng(0)
    shapes = {"q": (2, 6, 24, 8), "k": (2, 2, 24, 8), "v": (2, 2, 24, 8), "weight": (2, 6, 24, 8)}
    arrays = {name: random.standard_normal(shape) for name, shape in shapes.items()}
    numbers = None if DOCUMENTS[documents] is None else np.array(DOCUMENTS[documents])
    work = small_job(
        model={"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8},
        data={"sequence_length": 24},
        parallel={"context": kind},
    )
    tensors = {name: torch.from_numpy(array).requires_grad_() for name, array in arrays.items()}
    seen = seen_of(None if numbers is None else torch.from_numpy(numbers), 24)
    out = reference(tensors["q"], tensors["k"], tensors["v"], seen)
    (out * tensors["weight"]).sum().backward()
    expected = {"out": out.detach()} | {name: tensors[name].grad for name in "qkv"}
    for places, values in run_ranks(attention, ranks, work, arrays, numbers):
        assert values.keys() == expected.keys()
        for name, value in values.items():
            np.testing.assert_allclose(value, expected[name][:, :, places], rtol=1e-12, atol=1e-12, err_msg=name)


@lru_cache
def truth(documents: bool) -> Run:
    return run(job(documents=documents), Layout(), 3, masked=0.6)


@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(cp=2),
        Layout(cp=4),
        Layout(dp_shard=2, cp=2),
        Layout(cp=2, tp=2),
        Layout(pp=2, cp=2),
        Layout(dp_replicate=2, cp=2),
        Layout(dp_shard=3, cp=2),
        Layout(pp=2, cp=2, tp=2),
    ],
    ids=str,
)
def test_three_steps_equal_one_rank(layout: Layout, kind: str, documents: bool) -> None:
    actual = run(job(kind, documents=documents), layout, 3, masked=0.6)
    assert_same_steps(actual, truth(documents))


@pytest.mark.parametrize("kind", KINDS)
def test_several_sequences_per_micro_batch(kind: str) -> None:
    """Rows with documents of their own, rows of padding, and a rank without a valid token."""
    sections = {"training": {"micro_batch": 2}}
    masked = {"masked": 0.9, "empty_rows": (0, 4, 5, 6, 7)}
    expected = run(job(documents=True, **sections), Layout(), 2, **masked)
    actual = run(job(kind, documents=True, **sections), Layout(dp_shard=2, cp=2), 2, **masked)
    assert_same_steps(actual, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_stays_close_to_one_rank(kind: str) -> None:
    """bf16 has 8 bits: sums in another order differ by some 1e-2 of the largest gradient, and no more."""
    sections = {"training": {"precision": "bf16"}}
    expected = run(job(documents=True, **sections), Layout(dp_shard=2), 1)
    actual = run(job(kind, documents=True, **sections), Layout(cp=2), 1)
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=1e-3)
    assert_same_gradients(actual, expected, 3e-2)
