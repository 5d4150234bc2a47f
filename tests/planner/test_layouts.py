from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.load import parse_job
from elastic_train.planner.axis_sizes import layouts_of
from elastic_train.planner.constraints import check_layout
from elastic_train.planner.hardware_table import host_of
from elastic_train.planner.layout_search import LayoutSearch
from elastic_train.planner.layouts import (
    LayoutChoice,
    NoLayout,
    check_job,
    choose_for_all,
    choose_layout,
)
from elastic_train.planner.memory import memory_bytes
from elastic_train.planner.step_time import step_time
from tests.config.job_files import GOOD


def job_of(*overrides: str) -> Job:
    return parse_job(GOOD, overrides)


def choose(hosts: int, *overrides: str) -> LayoutChoice:
    job = job_of(*overrides)
    return choose_layout(job, hosts)


CHOICES = [
    (1, (), Layout(), 0),
    (4, (), Layout(dp_shard=4), 0),
    (3, ("parallel.pp=2",), Layout(pp=2), 1),
    (4, ("parallel.pp=2",), Layout(pp=2, dp_shard=2), 0),
    (5, ("parallel.tp=2", "parallel.dp_shard=2"), Layout(dp_shard=2, tp=2), 1),
    # 8 slots: more than 8 data ranks would have nothing to do
    (11, (), Layout(dp_shard=8), 3),
    # auto tensor parallelism is used where it saves more than its exchanges take: with long sequences
    (6, ("parallel.tp=auto",), Layout(dp_shard=4), 2),
    (8, ("parallel.tp=auto",), Layout(dp_shard=8), 0),
    (16, ("parallel.tp=auto",), Layout(dp_shard=8), 8),
    (16, ("parallel.tp=auto", "data.sequence_length=8192"), Layout(dp_shard=8, tp=2), 0),
    (16, ("parallel.tp=auto", "parallel.pp=auto", "parallel.dp_replicate=auto"), Layout(dp_shard=8), 8),
    (8, ("parallel.dp_replicate=auto",), Layout(dp_shard=8), 0),
    (8, ("parallel.dp_replicate=2",), Layout(dp_replicate=2, dp_shard=4), 0),
    (4, ("parallel.data=ddp",), Layout(dp_replicate=4), 0),
    (4, ("parallel.data=ddp", "parallel.dp_shard=auto"), Layout(dp_replicate=4), 0),
    # hsdp replicates and shards where the number of data ranks has two factors
    (8, ("parallel.data=hsdp",), Layout(dp_replicate=4, dp_shard=2), 0),  # gloo is best at all-reduces
    (6, ("parallel.data=hsdp",), Layout(dp_replicate=2, dp_shard=2), 2),
    (3, ("parallel.data=hsdp",), Layout(dp_shard=3), 0),
    (2, ("parallel.data=hsdp",), Layout(dp_shard=2), 0),
    # seven hosts, as they are left after one of eight is lost: 8 slots are 2 on each of 4, 5, 6 or 7 data ranks
    (7, ("parallel.data=ddp",), Layout(dp_replicate=4), 3),
    (7, ("parallel.data=zero1",), Layout(dp_shard=4), 3),
    (7, ("parallel.data=hsdp",), Layout(dp_replicate=2, dp_shard=2), 3),
    (7, ("parallel.data=hsdp", "parallel.dp_replicate=2"), Layout(dp_replicate=2, dp_shard=2), 3),
    (7, ("parallel.data=hsdp", "parallel.dp_shard=2"), Layout(dp_replicate=2, dp_shard=2), 3),
    (7, ("parallel.data=hsdp", "training.global_batch=14"), Layout(dp_shard=7), 0),
    (7, ("parallel.pp=2",), Layout(pp=2, dp_shard=3), 1),
    (7, ("parallel.pp=2", "parallel.data=ddp"), Layout(pp=2, dp_replicate=3), 1),
    (7, ("parallel.cp=2",), Layout(dp_shard=3, cp=2), 1),
    (7, ("parallel.cp=2", "parallel.tp=2"), Layout(cp=2, tp=2), 3),
    (7, ("parallel.cp=auto",), Layout(dp_shard=4), 3),
    (7, ("parallel.cp=auto", "data.sequence_length=8192"), Layout(dp_shard=3, cp=2), 1),
    # 8 slots over 3 data ranks are 3 micro-batches: with four stages too few, so one data rank is left
    (15, ("parallel.pp=4",), Layout(pp=4, dp_shard=2), 7),
    # 10 slots, interleaved, pp=2: on two data ranks five micro-batches become six, three rounds of two
    *(
        (hosts, ("parallel.pp=2", "parallel.pipeline=interleaved_1f1b", "training.global_batch=10"), layout, spares)
        for hosts, layout, spares in [
            (3, Layout(pp=2), 1),
            (5, Layout(pp=2, dp_shard=2), 1),
            (7, Layout(pp=2, dp_shard=3), 1),
            (9, Layout(pp=2, dp_shard=4), 1),
        ]
    ),
    # however many: no search through all of them
    (10**9, (), Layout(dp_shard=8), 10**9 - 8),
    (10**9, ("parallel=auto",), Layout(dp_shard=8), 10**9 - 8),
]


@pytest.mark.parametrize(("hosts", "overrides", "layout", "spares"), CHOICES)
def test_choice(hosts: int, overrides: tuple[str, ...], layout: Layout, spares: int) -> None:
    choice = choose(hosts, *overrides)
    assert (choice.layout, choice.spares) == (layout, spares)
    assert choice.used_hosts + choice.spares == hosts
    assert choice.reasons


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_hsdp_takes_the_fastest_of_all_splits(device: str) -> None:
    """Small models on many hosts wait for hops: short rings of few shards are faster than one long one."""
    job = job_of("parallel.data=hsdp", f"hosts.device={device}", "training.global_batch=512", "training.micro_batch=1")
    nodes, search = [8] * 8, LayoutSearch(job, 8)
    splits = [Layout(dp_replicate=2**power, dp_shard=64 // 2**power) for power in range(1, 6)]
    fastest = min(splits, key=lambda layout: search.time(layout).total)
    assert choose_layout(job, nodes).layout == fastest
    assert fastest.dp_replicate > 2


def test_too_few_hosts_says_how_many_would_do() -> None:
    with pytest.raises(
        NoLayout, match=r"3 hosts cannot hold parallel.pp=2 x parallel.tp=2: at least 4 hosts are needed"
    ):
        choose(3, "parallel.pp=2", "parallel.tp=2")


def test_violated_constraints_are_told_whatever_the_hosts() -> None:
    with pytest.raises(NoLayout, match=r"no number of hosts .*num_key_value_heads=2 is not divisible by tp=4"):
        choose(64, "parallel.tp=4")


def test_equal_rounds_are_filled_with_padding() -> None:
    """11 slots, pp=4, interleaved: 12 micro-batches on one data rank, 6 each on two."""
    options = ("parallel.pp=4", "parallel.pipeline=interleaved_1f1b", "model.num_hidden_layers=8")
    slots = ("training.global_batch=11", "training.micro_batch=1")
    one, two = (choose(hosts, *options, *slots) for hosts in (4, 8))
    assert (one.layout, two.layout) == (Layout(pp=4), Layout(pp=4, dp_shard=2))
    assert one.reasons[-1] == "11 slots over 1 data ranks of 12 micro-batches each: 1 are padding"
    assert two.reasons[-1] == "11 slots over 2 data ranks of 6 micro-batches each: 1 are padding"


def test_uneven_slots_are_said() -> None:
    assert any("8 slots over 3 data ranks" in reason for reason in choose(3).reasons)


def test_choice_is_explained() -> None:
    assert choose(7).reasons == [
        "7 hosts: dp_shard4 takes 0.0513 s a step by estimate (compute 0.0398 s, bubble 0 s, "
        "waiting for exchanges 0.0115 s)",
        "next best dp_shard3 takes 0.0695 s",
        "3 hosts kept as warm spares: dp_shard7 takes 0.0559 s, with 2 micro-batches on a data rank",
    ]


CONFIGS = {
    "data": (),
    "auto": ("parallel=auto",),
    "ddp": ("parallel.data=ddp", "parallel.pp=auto"),
    "hsdp": ("parallel.data=hsdp", "parallel.tp=auto"),
    "fixed": ("parallel.tp=2", "parallel.pp=auto"),
    "interleaved": ("parallel.pp=2", "parallel.pipeline=interleaved_1f1b", "training.global_batch=12"),
    "small": ("parallel=auto", "hosts.memory=2700KiB"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_number_of_hosts_has_a_legal_layout_and_more_are_never_slower(name: str) -> None:
    job = job_of(*CONFIGS[name])
    last = float("inf")
    for hosts in range(1, 17):  # primes included
        try:
            choice = choose_layout(job, hosts)
        except NoLayout:
            assert hosts == 1 or name == "small"
            assert last == float("inf"), f"fits on {hosts - 1} hosts, not on {hosts}"
            continue
        assert check_layout(job, choice.layout) == []
        assert choice.used_hosts == choice.layout.world_size == hosts - choice.spares
        assert choice.cost <= last
        assert choice == choose_layout(job, hosts)
        if (limit := job.hosts.memory_bytes) is not None:
            assert memory_bytes(job, choice.layout) <= limit
        last = choice.cost
    assert last < float("inf")


@pytest.mark.parametrize("name", ["data", "auto", "ddp", "fixed", "interleaved", "long", "gpus"])
def test_no_layout_takes_less_time_by_the_model_of_plan(name: str) -> None:
    more = {"long": ("parallel=auto", "data.sequence_length=4096"), "gpus": ("parallel=auto", "hosts.device=cuda")}
    job = job_of(*(CONFIGS | more)[name])
    host, fastest = host_of(job.hosts.device), float("inf")
    for hosts in range(1, 13):
        for layout in layouts_of(job.parallel, hosts):
            if not check_layout(job, layout):
                fastest = min(fastest, step_time(job, layout, replace(host, per_node=min(hosts, host.per_node))).total)
        if fastest < float("inf"):
            assert choose_layout(job, hosts).cost == pytest.approx(fastest, rel=2e-3), hosts


@pytest.mark.parametrize(
    ("nodes", "layout"),
    [
        ((4,), Layout(dp_shard=2, tp=2)),
        ((2, 2), Layout(dp_shard=2, tp=2)),
        ((3, 1), Layout(tp=2)),
        ((3, 3), Layout(dp_shard=2, tp=2)),
        ((3, 2, 1, 1, 1), Layout(dp_shard=2, tp=2)),
    ],
)
def test_tensor_ranks_stay_on_a_node(nodes: tuple[int, ...], layout: Layout) -> None:
    choice = choose_layout(job_of("parallel.tp=2"), nodes)
    assert (choice.layout, choice.spares) == (layout, sum(nodes) - layout.world_size)


def test_tensor_ranks_that_no_node_can_hold() -> None:
    job = job_of("parallel.tp=2", "hosts.max=4")
    with pytest.raises(NoLayout, match=r"parallel.tp=2 needs as many hosts on one node; .* 1; 4 hosts would do"):
        choose_layout(job, (1, 1))
    with pytest.raises(NoLayout, match=r"none up to hosts.max=4 would do"):
        choose_layout(job, (1, 1, 1))


def test_never_more_hosts_than_allowed() -> None:
    choice = choose_layout(job_of(), (4, 4), most=3)
    assert (choice.layout, choice.spares) == (Layout(dp_shard=3), 5)


def test_limit_of_memory_is_kept_and_the_number_that_would_do_is_told() -> None:
    job = job_of("hosts.memory=4000KiB", "hosts.max=8")
    needed = {hosts: memory_bytes(job, Layout(dp_shard=hosts)) for hosts in range(1, 9)}
    assert [hosts for hosts, size in needed.items() if size <= 4000 * 2**10] == [8]
    least = f"layout single needs {needed[1] / 2**20:,.1f} MiB a host; hosts.memory="
    with pytest.raises(NoLayout, match=rf"{least}4000KiB; 8 hosts would do"):
        choose_layout(job, 2)
    assert choose_layout(job, 8).layout == Layout(dp_shard=8)
    (problem,) = check_job(job_of("hosts.memory=1KiB", "hosts.max=8"))
    assert problem.startswith(f"hosts.min=1: 1 host cannot run this job: {least}")
    assert problem.endswith("none up to hosts.max=8 would do")


def test_one_rank_is_taken_where_those_that_share_would_need_more() -> None:
    """Alone it gathers nothing; two hold half of the state, and all weights and gradients beside it."""
    job = job_of("hosts.memory=4500KiB", "hosts.max=8")
    assert memory_bytes(job, Layout()) < 4500 * 2**10 < memory_bytes(job, Layout(dp_shard=2))
    choices = [choose_layout(job, hosts) for hosts in (1, 4, 8)]
    assert [(choice.layout, choice.spares) for choice in choices] == [
        (Layout(), 0),
        (Layout(), 3),
        (Layout(dp_shard=8), 0),
    ]


def test_exact_jobs_keep_the_axes_that_change_bits() -> None:
    for hosts in range(1, 17):
        layout = choose(hosts, "parallel=auto", "training.determinism=exact").layout
        assert (layout.tp, layout.cp) == (1, 1)


def test_all_hosts_of_torchrun_are_used() -> None:
    assert choose_for_all(job_of(), 7).layout == Layout(dp_shard=7)
    with pytest.raises(NoLayout, match="no layout of this job uses all of 9 hosts"):
        choose_for_all(job_of(), 9)


@pytest.mark.parametrize("memory", [(), ("hosts.memory=80GiB",)])
def test_five_hundred_hosts_are_planned_at_once(memory: tuple[str, ...]) -> None:
    """The time goes with the layouts that are looked at: some 0.2 ms each, 1 ms with a limit of memory."""
    large = ("model.preset=llama3-70b", "data.sequence_length=8192", "training.global_batch=1024")
    job = job_of(*large, "training.precision=bf16", "hosts.max=512", "parallel=auto", *memory)
    search = LayoutSearch(job, 8)
    assert search.best([8] * 64, 512)
    assert search.looked_at < 100


def test_every_enumerated_layout_has_the_size_and_keeps_the_fixed_axes() -> None:
    parallel = job_of("parallel.pp=2", "parallel.tp=auto", "parallel.dp_replicate=auto").parallel
    layouts = list(layouts_of(parallel, 24))
    assert len(layouts) == len(set(layouts)) == 18  # 12 = 2^2 x 3 over three axes: C(4, 2) x C(3, 2)
    assert all(layout.world_size == 24 and layout.pp == 2 for layout in layouts)
    assert not list(layouts_of(parallel, 23))


def test_check_job() -> None:
    assert check_job(job_of()) == []
    (problem,) = check_job(job_of("parallel.pp=2"))
    assert problem.startswith("hosts.min=1: 1 host cannot hold parallel.pp=2")
    heads = ("model.hidden_size=640", "model.num_attention_heads=40", "model.num_key_value_heads=8", "parallel.tp=3")
    problems = check_job(job_of(*heads))
    for number in ("num_attention_heads=40", "num_key_value_heads=8", "intermediate_size=128", "sequence_length=32"):
        assert any(number in problem and "tp=3" in problem for problem in problems), number
