"""Heartbeats are answered while ten thousand ranks are told where their state is; here: after each rank."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from benchmarks.control_plane import JOB, Simulation, make_data
from elastic_train.config.load import parse_job
from elastic_train.controller import directions


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_data(folder)
    return folder / "data"


@pytest.fixture
def simulation(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Simulation:
    monkeypatch.setattr(directions, "SLICE_SECONDS", 0.0)
    return Simulation(parse_job(JOB.format(data=data, storage=tmp_path, hosts=64, batch=64)))


async def second_generation(simulation: Simulation) -> None:
    """Formed from the snapshots of the first one, which has just told what it holds: none of it is read yet."""
    await simulation.coordinator.start()
    for number in range(64):
        simulation.join(number)
    while simulation.coordinator.generation is None:
        await asyncio.sleep(0.01)
    simulation.describe(simulation.descriptions())
    simulation.step(1)
    simulation.coordinator._lose(simulation.hosts[0])
    while simulation.coordinator.generation.number == 1:
        await asyncio.sleep(0)


def directed(simulation: Simulation) -> list[dict[str, Any]]:
    return [host.connection for host in simulation.hosts if "directions" in host.connection.sent]


def test_one_rank_is_told_at_a_time_and_each_is(simulation: Simulation) -> None:
    async def run() -> None:
        await second_generation(simulation)
        generation = simulation.coordinator.generation
        assert generation is not None
        simulation.describe(simulation.descriptions())
        told = [0]
        while told[-1] < generation.layout.world_size:
            await asyncio.sleep(0)
            told.append(len(directed(simulation)))
        assert max(after - before for before, after in itertools.pairwise(told)) == 1
        assert {connection.sent["directions"] for connection in directed(simulation)} == {1}
        await simulation.coordinator.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_the_ranks_of_a_generation_that_is_over_are_told_nothing(simulation: Simulation) -> None:
    async def run() -> None:
        await second_generation(simulation)
        coordinator = simulation.coordinator
        simulation.describe(simulation.descriptions())
        while not directed(simulation):
            await asyncio.sleep(0)
        coordinator.run.generation = None
        while coordinator._directions._working:
            await asyncio.sleep(0)
        assert len(directed(simulation)) == 1
        await coordinator.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_uploads_are_planned_before_the_first_step(simulation: Simulation) -> None:
    async def run() -> None:
        await simulation.coordinator.start()
        for number in range(64):
            simulation.join(number)
        while (generation := simulation.coordinator.generation) is None:
            await asyncio.sleep(0.01)
        simulation.describe(simulation.descriptions())
        while not (plans := simulation.coordinator.run.checkpointer._plans):
            await asyncio.sleep(0)
        assert [len(plans[number]) for number in plans] == [generation.layout.world_size]
        await simulation.coordinator.close()

    asyncio.run(asyncio.wait_for(run(), 60))
