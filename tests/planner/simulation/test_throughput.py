from __future__ import annotations

import pytest

from elastic_train.config.load import parse_job
from elastic_train.planner.layouts import choose_layout
from elastic_train.planner.simulation.throughput import Share, planned, proportional
from tests.config.job_files import GOOD


def test_in_proportion_to_whole_replicas() -> None:
    share = proportional(64, least=32, unit=16)
    assert share({8: 8}) == Share(64, 1.0)
    assert share({8: 10}) == Share(64, 1.0)
    assert share({8: 7, 7: 1}) == Share(48, 0.75)
    assert share({8: 4}) == Share(32, 0.5)
    assert share({8: 3, 7: 1}) is None
    assert proportional(8, least=1, unit=4)({3: 1}) is None


def test_as_the_planner_lays_a_job_out() -> None:
    job = parse_job(GOOD, ["parallel.pp=2", "hosts.min=2", "hosts.max=8"])
    share = planned(job, {4: 2})
    assert share({4: 2}) == Share(8, 1.0)
    seven = choose_layout(job, [4, 3], 8)
    assert share({4: 1, 3: 1}) == Share(
        seven.used_hosts, pytest.approx(choose_layout(job, [4, 4], 8).cost / seven.cost)
    )
    assert share({1: 1}) is None  # fewer than hosts.min
    tensor = planned(parse_job(GOOD, ["parallel.tp=2", "hosts.min=2", "hosts.max=8"]), {4: 2})
    assert tensor({1: 4}) is None  # enough hosts, and no two on a node
