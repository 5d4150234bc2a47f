"""The search against trying everything, and what it promises about limits."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest

from elastic_train.config.job import Job
from elastic_train.config.load import parse_job
from elastic_train.config.parallel import ParallelConfig
from elastic_train.planner.constraints import violated
from elastic_train.planner.hardware_table import accelerator
from elastic_train.planner.memory import memory_bytes
from elastic_train.planner.ranking import MEMORY, SLOWER
from elastic_train.planner.search import rank_layouts
from elastic_train.planner.search_bound import Floor
from elastic_train.planner.search_fit import Fewest, Fit
from elastic_train.planner.search_memory import MemoryFloor
from elastic_train.planner.search_options import Mesh
from elastic_train.planner.search_space import space_of
from elastic_train.planner.step_time import step_time

H100 = accelerator("h100-80gb")
SMALL = """
name: small
model: {hidden_size: 512, num_hidden_layers: 8, num_attention_heads: 8, num_key_value_heads: 4, intermediate_size: 1536,
        vocab_size: 32000}
data: {uri: data, sequence_length: 1024}
training: {steps: 10, global_batch: 16, precision: bf16}
hosts: {device: cuda}
"""
LLAMA = """
name: llama
model: {preset: llama3-70b}
data: {uri: data, sequence_length: 8192}
training: {steps: 10, global_batch: 1024, precision: bf16}
hosts: {device: cuda}
"""


def job_of(*overrides: str, text: str = SMALL) -> Job:
    return parse_job(text, overrides)


def everything(job: Job, gpus: int, limit: int) -> dict[Mesh, float]:
    """The least seconds per step of each mesh that has options that fit, found without any shortcut.

    Of meshes with any number of data ranks.
    """
    space, found = space_of(job, H100.per_node), {}
    meshes = (replace(mesh, data_ranks=n) for mesh in space.widest(gpus) for n in range(1, mesh.data_ranks + 1))
    for mesh in meshes:
        ways = itertools.product(space.sharings(mesh), space.schedules(mesh), space.micro_batches(), space.recomputes())
        for way in ways:
            own, layout = space.question(mesh, *way)
            assert ParallelConfig.model_validate(own.parallel.model_dump())
            if violated(own, layout) is None and memory_bytes(own, layout) <= limit:
                seconds = step_time(own, layout, H100).total
                found[mesh] = min(seconds, found.get(mesh, seconds))
    return found


@pytest.mark.parametrize(
    ("gpus", "limit", "overrides"),
    [
        (1, H100.memory_bytes, ()),
        (4, 2 * 2**30, ("parallel.cp=1",)),
        (6, 1800 * 2**20, ("parallel.cp=1", "parallel.tp=1")),
        (8, H100.memory_bytes, ("parallel.pp=1",)),
        (8, 1700 * 2**20, ("parallel.pp=1", "parallel.tp=2")),
        (4, 1400 * 2**20, ("parallel.pp=1", "parallel.cp=1", "parallel.offload=true")),
        (2, 1700 * 2**20, ("parallel.tp=1", "parallel.cp=1", "parallel.offload=true", "training.micro_batch=1")),
        (4, 2 * 2**30, ("parallel.cp=1", "parallel.pp=1", "parallel.prefetch=0")),
        (16, 1600 * 2**20, ("parallel.data=zero3", "parallel.tp=1", "training.micro_batch=1")),
        (7, H100.memory_bytes, ("parallel.cp=1", "parallel.tp=1", "training.global_batch=8", "training.micro_batch=1")),
        (13, 1800 * 2**20, ("parallel.pp=1", "parallel.cp=1", "parallel.tp=1")),
        (6, 1250 * 2**20, ("parallel.cp=1", "init_from=x", "lora.target_modules=all-linear")),
        (5, H100.memory_bytes, ("parallel.pp=4", "parallel.pipeline=1f1b", "parallel.tp=1", "parallel.cp=1")),
    ],
)
def test_it_finds_what_trying_everything_finds(gpus: int, limit: int, overrides: tuple[str, ...]) -> None:
    job = job_of(*overrides)
    found, space = everything(job, gpus, limit), space_of(job, H100.per_node)
    ranking = rank_layouts(job, gpus, H100, limit, shown=5)
    assert ranking.best[0].time.total == pytest.approx(min(found.values()), rel=1e-12)
    expected = sorted(seconds for mesh, seconds in found.items() if mesh in set(space.meshes(gpus)))
    assert [plan.time.total for plan in ranking.best] == pytest.approx(expected[:5], rel=1e-12)
    asked = len(list(space.meshes(gpus))) + len(list(space.forbidden(gpus)))
    assert len(ranking.best) + sum(entry.count for entry in ranking.rejected.values()) == asked
    for plan in ranking.best:
        assert plan.fullest.total <= limit
        assert violated(plan.job, plan.layout) is None
        assert plan.time == step_time(plan.job, plan.layout, H100)


CPU = ("hosts.device=cpu", "training.precision=fp32", "training.global_batch=64")


@pytest.mark.parametrize(
    ("text", "changes", "chip", "ranks"),
    [
        (LLAMA, (), "h100-80gb", 256),
        (LLAMA, ("parallel.offload=true",), "h100-80gb", 64),
        (LLAMA, ("training.reduce_dtype=bf16", "optimizer.name=lion", "parallel.context=ulysses"), "a100-80gb", 64),
        (LLAMA, ("data.document_mask=true", "training.precision=fp8"), "h100-80gb", 64),
        (LLAMA, (), "mi300x", 32),
        (LLAMA, ("init_from=x", "lora.target_modules=all-linear", "lora.rank=64"), "h100-80gb", 32),
        (SMALL, CPU, "cpu", 16),  # ranks that share cores
    ],
)
def test_bounds_are_never_above_what_they_bound(text: str, changes: tuple[str, ...], chip: str, ranks: int) -> None:
    machine = accelerator(chip)
    space = space_of(job_of(*changes, text=text), machine.per_node)
    floor, memory, random = Floor(space, machine), MemoryFloor(space), Random(1)
    meshes, looked_at = list(space.meshes(ranks)), 0
    while looked_at < 60:
        mesh = random.choice(meshes)
        schedule, micro_batch = random.choice(list(space.ways(mesh)))
        sharing, recompute = random.choice(space.sharings(mesh)), random.choice(space.recomputes())
        job, layout = space.question(mesh, sharing, schedule, micro_batch, recompute)
        if violated(job, layout) is None:
            looked_at += 1
            way = floor.of_way(mesh, schedule, micro_batch)
            assert floor.of(mesh) <= way * (1 + 1e-12)
            shared = floor.of_sharing(mesh, schedule, micro_batch, sharing)
            assert way <= shared * (1 + 1e-12)
            assert shared <= step_time(job, layout, machine).total * (1 + 1e-12), (layout, job)
            needed = memory_bytes(job, layout)
            assert memory.of(mesh, (sharing, schedule, micro_batch, recompute)) <= needed, (layout, job)
            wider = replace(mesh, data_ranks=min(space.slots, mesh.data_ranks * random.randint(1, 9)))
            assert memory.outline(wider, fewer=True) <= memory.outline(mesh) <= needed, (layout, job)


def test_both_kinds_of_context_parallelism_compete() -> None:
    """Ulysses where heads divide, as torch has a flash kernel for it; gather where they do not, or it is asked for."""
    first = rank_layouts(job_of("parallel.cp=2", "parallel.tp=1", text=LLAMA), 64, H100).best[0]
    assert first.options["context"] == "ulysses"
    first = rank_layouts(job_of("parallel.cp=16", "parallel.tp=1", text=LLAMA), 64, H100).best[0]
    assert first.options["context"] == "gather"
    first = rank_layouts(job_of("parallel.cp=2", "parallel.context=gather", text=LLAMA), 64, H100).best[0]
    assert first.options["context"] == "gather"


def test_what_the_job_file_says_stays() -> None:
    job = job_of("parallel.pp=2", "training.recompute=full", "training.micro_batch=2", "parallel.data=zero2")
    ranking = rank_layouts(job, 8, H100)
    assert ranking.best
    for plan in ranking.best:
        training, parallel = plan.job.training, plan.job.parallel
        assert (plan.layout.pp, training.recompute, training.micro_batch, parallel.data) == (2, "full", 2, "zero2")


def test_auto_and_what_is_not_written_are_free() -> None:
    assert space_of(job_of("parallel.pp=auto", "parallel.tp=2"), 8).free >= {"pp", "dp_shard", "data", "micro_batch"}
    assert not space_of(job_of("parallel.tp=1", "training.micro_batch=1"), 8).free & {"tp", "micro_batch"}


def test_tensor_ranks_stay_on_a_node() -> None:
    ranking = rank_layouts(job_of("parallel.pp=4", "parallel.cp=1", text=LLAMA), 64, H100, shown=1000)
    assert {plan.layout.tp for plan in ranking.best} == {2, 4, 8}


def test_the_same_question_has_the_same_answer() -> None:
    first, second = (rank_layouts(job_of(), 8, H100) for _ in range(2))
    assert [(plan.job, plan.layout) for plan in first.best] == [(plan.job, plan.layout) for plan in second.best]
    assert first.rejected == second.rejected


def test_the_fastest_come_first_and_each_mesh_once() -> None:
    best = rank_layouts(job_of(), 8, H100, shown=1000).best
    assert [plan.time.total for plan in best] == sorted(plan.time.total for plan in best)
    meshes = [(plan.layout.tp, plan.layout.pp, plan.layout.cp, plan.layout.data_ranks) for plan in best]
    assert len(set(meshes)) == len(meshes)


def test_what_is_ruled_out_names_its_limit_and_the_nearest() -> None:
    ranking = rank_layouts(job_of(text=LLAMA), 64, H100)
    assert "biggest term is" in ranking.rejected[MEMORY].example
    assert "largest tp of this model: 8" in ranking.rejected["num_attention_heads"].example
    assert ranking.rejected[SLOWER].count > 0


def test_more_memory_is_never_slower() -> None:
    job = job_of(text=LLAMA)
    times = [rank_layouts(job, 64, H100, size * 2**30, shown=1).best[0].time.total for size in (60, 80, 140)]
    assert times == sorted(times, reverse=True)


def test_a_step_on_many_accelerators_is_found_after_few_looks() -> None:
    job = job_of("model.preset=llama3-405b", text=LLAMA)
    ranking = rank_layouts(job, 16384, H100)
    meshes = sum(1 for _ in space_of(job, H100.per_node).meshes(16384))
    assert meshes > 2000
    assert ranking.looked_at < 5000
    assert ranking.best[0].layout.world_size > 8192


def test_a_block_that_never_fits_is_known_before_any_number_is_tried() -> None:
    model = ("model.hidden_size=8192", "model.intermediate_size=28672", "model.vocab_size=512", "parallel.tp=1")
    space, mesh = space_of(job_of(*model, "parallel.pp=1", "parallel.cp=1"), H100.per_node), Mesh(1, 1, 1, 8)
    outline, limit = MemoryFloor(space).outline(mesh, fewer=True), 6 * 8192 * 28672 * 3
    fit = Fit(space, H100, limit)
    leanest = fit.leanest(mesh)
    assert leanest is not None and limit < outline <= leanest.fullest.total
    assert fit.fewest() == Fewest(None, certain=True)
    assert fit.looked_at == 0


@pytest.mark.parametrize(
    ("gpus", "gib", "overrides"),
    [
        (8, 24, ()),
        (64, 8, ("parallel.pp=2", "parallel.data=hsdp")),
        (1 << 20, 4, ()),
        (1 << 20, 24, ("training.recompute=none", "training.micro_batch=64", "parallel.data=ddp", "parallel.cp=1")),
    ],
)
def test_what_does_not_fit_is_known_after_few_looks(gpus: int, gib: int, overrides: tuple[str, ...]) -> None:
    job, limit = job_of("model.preset=llama3-405b", *overrides, text=LLAMA), gib * 2**30
    ranking = rank_layouts(job, gpus, H100, limit)
    assert not ranking.best
    assert ranking.looked_at < 100
    assert "biggest term is" in ranking.rejected[MEMORY].example
    fit = Fit(space_of(job, H100.per_node), H100, limit)
    fit.fewest()
    assert fit.looked_at <= 500


def test_the_fewest_accelerators_are_what_trying_each_number_finds() -> None:
    for overrides in ((), ("parallel.tp=2", "parallel.pp=2"), ("parallel.data=ddp", "parallel.cp=1")):
        job = job_of(*overrides)
        for limit in (1600, 2000):
            tried = (count for count in range(1, 17) if rank_layouts(job, count, H100, limit * 2**20, shown=1).best)
            assert Fit(space_of(job, H100.per_node), H100, limit * 2**20).fewest().count == next(tried, None)


def test_patience_ends() -> None:
    fit = Fit(space_of(job_of(text=LLAMA), H100.per_node), H100, 40 * 2**30)
    fit.looked_at = 10**6
    assert not fit.fewest().certain
    assert not fit.some(list(space_of(job_of(text=LLAMA), H100.per_node).widest(64)))
    assert fit.first(64) is None


def test_released_weights_come_anew_where_one_accelerator_cannot_keep_them() -> None:
    """Offloaded state, alone: nothing is shared, but gathered from CPU memory."""
    job = job_of("parallel.offload=true", "model.num_hidden_layers=64", "training.micro_batch=1")
    kept = rank_layouts(job, 1, H100).best[0]
    assert not kept.options["reshard_after_forward"]
    released = rank_layouts(job, 1, H100, kept.fullest.total * 3 // 4).best[0]
    assert released.options["reshard_after_forward"]
    assert released.time.total > kept.time.total
