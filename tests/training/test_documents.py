"""``data.document_mask``: documents do not see each other, on one rank and on many."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from tests.parallel.contexts import token_losses
from tests.ranks import run_ranks
from tests.training.runs import Run, assert_same_steps, run
from tests.training.synthetic import small_job

# The fast tests cover this subject by the rows of test_parity.py.
pytestmark = pytest.mark.slow


def job(context: str = "gather", **data: Any) -> Job:
    data = {"document_mask": True} | data
    return small_job(
        model={"num_attention_heads": 8, "num_key_value_heads": 4}, data=data, parallel={"context": context}
    )


def losses(ranks: int, context: str, ids: list[int], documents: list[int]) -> list[float]:
    """Loss of each token of one sequence, in order."""
    work = job(context, sequence_length=len(documents))
    by_place = {
        place: loss
        for places, values in run_ranks(token_losses, ranks, work, ids, documents)
        for place, loss in zip(places, values, strict=True)
    }
    return [by_place[place] for place in range(len(documents))]


RANKS = [(1, "gather"), (2, "gather"), (4, "gather"), (2, "ulysses"), (4, "ulysses")]


@pytest.mark.parametrize(("ranks", "context"), RANKS)
def test_a_document_does_not_see_the_one_before(ranks: int, context: str) -> None:  # LOSS-10
    """[A B C EOS][D E F G]: with another first document the losses of the second one's tokens are bitwise the same."""
    documents = [0, 0, 0, 0, 1, 1, 1, 1]
    first = losses(ranks, context, [11, 12, 13, 0, 21, 22, 23, 24, 25], documents)
    other = losses(ranks, context, [201, 99, 57, 0, 21, 22, 23, 24, 25], documents)
    assert other[4:] == first[4:]
    assert all(loss != same for loss, same in zip(other[:4], first[:4], strict=True))


@pytest.mark.parametrize(("ranks", "context"), RANKS)
def test_a_document_in_a_pack_has_the_losses_it_has_alone(ranks: int, context: str) -> None:
    packed = losses(ranks, context, [11, 12, 13, 0, 21, 22, 23, 24, 25], [0, 0, 0, 0, 1, 1, 1, 1])
    alone = losses(1, context, [21, 22, 23, 24, 25], [0, 0, 0, 0])
    np.testing.assert_allclose(packed[4:], alone, rtol=1e-5)


def test_without_the_mask_it_is_seen() -> None:
    first = losses(1, "gather", [11, 12, 13, 0, 21, 22, 23, 24, 25], [0] * 8)
    other = losses(1, "gather", [201, 99, 57, 0, 21, 22, 23, 24, 25], [0] * 8)
    assert all(abs(loss - same) > 1e-4 for loss, same in zip(other[4:], first[4:], strict=True))


def test_the_label_after_an_end_of_text_token_counts() -> None:
    """LOSS-10: The first token of the next document is predicted from the document that ends."""
    assert run(job(), Layout(), 1, lengths=(16, 16)).losses[0] > 0
    one, other = (losses(1, "gather", [11, 12, 13, 0, next_token, 22], [0, 0, 0, 0, 1]) for next_token in (21, 31))
    assert one[:3] == other[:3] and one[3] != other[3]


LENGTHS = {
    "one token": (1, 30, 1),
    "all chunks": (32,),
    "ends at chunk borders": (4, 4, 8, 8, 8),
    # Not all of them: q and k would have no gradient but rounding.
    "single tokens": (1,) * 16 + (16,),
    "across borders": (5, 22, 5),
}


@lru_cache
def truth(lengths: str) -> Run:
    return run(job(), Layout(), 1, lengths=LENGTHS[lengths])


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    ("layout", "context"),
    [
        (Layout(cp=4), "gather"),
        (Layout(cp=4), "ulysses"),
        (Layout(tp=2), "gather"),
        (Layout(pp=2), "gather"),
        (Layout(dp_shard=2), "gather"),
    ],
    ids=str,
)
def test_documents_of_every_length_equal_one_rank(layout: Layout, context: str, lengths: str) -> None:
    assert_same_steps(run(job(context), layout, 1, lengths=LENGTHS[lengths]), truth(lengths))


def test_one_document_is_no_mask() -> None:
    assert_same_steps(truth("all chunks"), run(job(document_mask=False), Layout(), 1))


@pytest.mark.parametrize(
    ("layout", "context"), [(Layout(), "gather"), (Layout(cp=2), "gather"), (Layout(cp=2), "ulysses")], ids=str
)
def test_rows_of_padding_only_give_zero_gradients(layout: Layout, context: str) -> None:
    """NU-08: Their loss is 0, not NaN: every token sees at least itself."""
    result = run(job(context), layout, 1, empty_rows=tuple(range(8)))
    assert (result.losses, result.norms) == ([0.0], [0.0])
    assert not any(gradient.any() for gradient in result.gradients[0].values())
    some = run(job(context), layout, 1, empty_rows=(3,))
    assert all(math.isfinite(value) for value in some.losses + some.norms)


@pytest.mark.parametrize("context", ["gather", "ulysses"])
def test_the_loss_is_not_a_multiple_of_cp(context: str) -> None:
    """LOSS-04: Every token is counted once: the same loss for cp = 1, 2 and 4."""
    one, two, four = (run(job(context), Layout(cp=cp), 1, masked=0.5).losses for cp in (1, 2, 4))
    np.testing.assert_allclose([two, four], [one, one], rtol=1e-6)
