from __future__ import annotations

import pytest

from elastic_train.config.layout import Layout
from tests.parallel.release import gathered
from tests.ranks import run_ranks
from tests.training.synthetic import small_job


# Embedding, norm and head stay gathered from the forward to the backward pass in any case.
@pytest.mark.parametrize(("reshard", "kept"), [(False, 39), (True, 3)])
def test_what_a_forward_pass_has_gathered_is_released(reshard: bool, kept: int) -> None:
    job = small_job(parallel={"reshard_after_forward": reshard})
    assert run_ranks(gathered, 2, job, Layout(dp_shard=2)) == [(kept, 0)] * 2
