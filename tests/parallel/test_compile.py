"""Compiled blocks compute what eager ones do."""

from __future__ import annotations

import pytest
import torch

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.model.transformer import Transformer
from elastic_train.parallel.compile import apply_compile
from tests.parallel.compilations import compiled_graphs
from tests.ranks import run_ranks
from tests.training.runs import assert_same_steps, count_beats, run
from tests.training.synthetic import small_job


def job(compile: bool = True, recompute: str = "none", documents: bool = False) -> Job:
    return small_job(training={"compile": compile, "recompute": recompute}, data={"document_mask": documents})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "recompute", "documents"),
    [
        (Layout(), "none", True),
        (Layout(dp_shard=2), "full", False),
        (Layout(tp=2), "selective", False),
        (Layout(pp=2, cp=2), "none", True),
    ],
    ids=str,
)
def test_gradients_equal_eager(layout: Layout, recompute: str, documents: bool) -> None:
    expected = run(job(False, documents=documents), Layout(), 2, masked=0.5)
    actual = run(job(True, recompute, documents), layout, 2, masked=0.5)
    assert_same_steps(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_all_blocks_share_what_the_first_step_compiles(recompute: str) -> None:
    """Sharded blocks too: before and after attention, once for the first block, whose input has no gradient history."""
    for graphs, later in run_ranks(compiled_graphs, 2, job(recompute=recompute), Layout(dp_shard=2)):
        assert 1 <= graphs <= 4
        assert later == 0


@pytest.mark.slow
def test_progress_is_reported_as_in_eager_blocks() -> None:
    for beats, blocks in run_ranks(count_beats, 1, job(), Layout()):
        assert beats == 2 * blocks * 8


def test_a_machine_without_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ValueError, match=r"training.compile=true needs a C\+\+ compiler on cpu, and 'no-such-compiler'"
    ):
        apply_compile(Transformer(job().model), torch.device("cpu"))
