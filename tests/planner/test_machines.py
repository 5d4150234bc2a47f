"""What layouts are planned for where the hosts say what they are."""

from __future__ import annotations

import pytest

from elastic_train.config.layout import Layout
from elastic_train.config.load import parse_job
from elastic_train.planner.hardware_table import accelerators
from elastic_train.planner.layouts import NoLayout, choose_layout
from elastic_train.planner.machines import Told, known_accelerator, machine_of
from elastic_train.planner.memory import memory_bytes
from tests.config.job_files import GOOD

MIB = 2**20
CPU = parse_job(GOOD)
CUDA = parse_job(GOOD, ["hosts.device=cuda", "training.precision=bf16"])
NAMES = {
    "NVIDIA H100 80GB HBM3": "h100-80gb",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "A100-SXM4-80GB": "a100-80gb",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI300X OAM": "mi300x",
    "NVIDIA H100 PCIe": None,
    "NVIDIA A100 80GB PCIe": None,
    "NVIDIA GB200": None,
    "NVIDIA H200 MIG 1g.18gb": None,
    "Tesla T4": None,
    "": None,
}


@pytest.mark.parametrize(("name", "kind"), NAMES.items())
def test_names_that_drivers_tell(name: str, kind: str | None) -> None:
    assert known_accelerator(name) == (None if kind is None else accelerators()[kind])


def test_known_gpus_are_planned_as_what_they_are() -> None:
    told = Told("NVIDIA H200", 143_771 * MIB, 1500 * 2**30)
    machine = machine_of(CUDA, [told, told], 4)
    assert (machine.accelerator.name, machine.accelerator.per_node) == ("h200", 4)
    assert machine.accelerator.host_memory_bytes == 1500 * 2**30
    assert machine.memory_bytes == accelerators()["h200"].memory_bytes
    assert choose_layout(CUDA, 4, machine=machine).reasons[-1] == "NVIDIA H200: planned as h200 with 139.80 GiB"


def test_an_unknown_gpu_is_told_and_its_own_memory_is_the_limit() -> None:
    machine = machine_of(CUDA, [Told("Tesla T4", 15360 * MIB)], 8)
    (sentence,) = machine.said
    assert sentence == "Tesla T4 is not known: speeds of h100-80gb are assumed, its memory is taken as 14.00 GiB"
    assert machine.memory_bytes == 14 * 2**30
    large = parse_job(GOOD, ["hosts.device=cuda", "model.preset=llama3-8b", "training.precision=bf16", "hosts.max=8"])
    with pytest.raises(NoLayout, match=r"needs [\d,.]+ MiB a host; they have 14,336.0 MiB"):
        choose_layout(large, 1, machine=machine)


def test_hosts_that_say_nothing_have_no_limit_and_that_is_told() -> None:
    machine = machine_of(CUDA, [Told()], 8)
    assert machine.memory_bytes is None
    assert machine.said == ("hosts do not tell what GPUs they have: speeds of h100-80gb are assumed",)


def test_of_different_hosts_the_slowest_and_the_smallest_count() -> None:
    told = [Told("NVIDIA H200", 143_771 * MIB), Told("NVIDIA A100-SXM4-40GB", 40_960 * MIB)]
    machine = machine_of(CUDA, told, 8)
    assert (machine.accelerator.name, machine.memory_bytes) == ("a100-40gb", accelerators()["a100-40gb"].memory_bytes)
    assert len(machine.said) == 2


def test_cpu_hosts_share_the_memory_of_their_node_unless_the_job_says_otherwise() -> None:
    needed = memory_bytes(CPU, Layout(dp_shard=4))
    assert machine_of(CPU, [Told(node_bytes=8000), Told(node_bytes=4000)], 4).memory_bytes == 1000
    enough, less = (machine_of(CPU, [Told(node_bytes=4 * size)], 4) for size in (needed, needed - 1))
    assert choose_layout(CPU, 4, machine=enough).layout == Layout(dp_shard=4)
    assert choose_layout(parse_job(GOOD, ["hosts.memory=1GiB"]), 4, machine=less).layout == Layout(dp_shard=4)
    with pytest.raises(NoLayout, match="they have"):
        choose_layout(CPU, 4, machine=machine_of(CPU, [Told(node_bytes=4096)], 4))
