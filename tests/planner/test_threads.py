"""``hosts.threads`` of CPU ranks in the time of a step, and in what a run teaches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.load import parse_job
from elastic_train.planner.calibration import calibrate
from elastic_train.planner.hardware_table import accelerator, host_of
from elastic_train.planner.search_bound import Floor
from elastic_train.planner.search_options import Mesh
from elastic_train.planner.search_space import space_of
from elastic_train.planner.step_time import step_time
from tests.config.job_files import GOOD

LARGE = ("model.hidden_size=2048", "model.intermediate_size=8192", "data.sequence_length=512", "hosts.max=8")
CPU = accelerator("cpu")


def job_of(threads: int, *overrides: str) -> Job:
    return parse_job(GOOD, [f"hosts.threads={threads}", *LARGE, *overrides])


def seconds(threads: int, layout: Layout, cores: int | None) -> dict[str, float]:
    return step_time(job_of(threads), layout, replace(CPU, computing_at_once=cores)).terms


def test_threads_compute_as_many_times_as_fast_while_there_are_cores() -> None:
    one, four = (seconds(threads, Layout(), 8) for threads in (1, 4))
    assert four["forward"] == pytest.approx(one["forward"] / 4)
    assert four["update"] == pytest.approx(one["update"] / 4)
    assert four["blocks, whatever their size"] == one["blocks, whatever their size"]


@pytest.mark.parametrize(("layout", "cores"), [(Layout(), 1), (Layout(dp_shard=4), 4), (Layout(dp_shard=8), 4)])
def test_threads_without_cores_gain_nothing(layout: Layout, cores: int) -> None:
    assert seconds(4, layout, cores) == seconds(1, layout, cores)


def test_hosts_of_the_pool_have_cores_of_their_own_and_gpus_do_not_care() -> None:
    layout, host = Layout(dp_shard=4), host_of("cpu")
    slow, fast = (step_time(job_of(threads), layout, host).terms["forward"] for threads in (1, 8))
    assert fast == pytest.approx(slow / 8)
    gpu = [
        step_time(job_of(n, "hosts.device=cuda", "training.precision=bf16"), layout, host_of("cuda")) for n in (1, 8)
    ]
    assert gpu[0].total == gpu[1].total


@pytest.mark.parametrize("cores", [2, 8, None])
def test_the_bound_of_a_search_is_still_one(cores: int | None) -> None:
    machine = replace(CPU, computing_at_once=cores)
    job = job_of(4, "parallel.data=zero3")
    floor = Floor(space_of(job, machine.per_node), machine)
    for ranks in (1, 2, 4, 8):
        assert floor.of(Mesh(1, 1, 1, ranks)) <= step_time(job, Layout(dp_shard=ranks), machine).total


def test_a_run_with_threads_teaches_the_efficiency_of_one() -> None:
    """Else a plan with another number of threads would be off by their ratio."""
    machine, true = replace(CPU, computing_at_once=8), 0.31
    slower = replace(machine, efficiency=true, block_seconds=machine.block_seconds * machine.efficiency / true)
    took = step_time(job_of(4), Layout(), slower).total
    lines = [{"generation": 1, "layout": "single", "step": step, "seconds": took} for step in range(1, 9)]
    learnt = calibrate(job_of(4), lines, [], machine).accelerator
    assert learnt.efficiency == pytest.approx(true, rel=1e-3)
