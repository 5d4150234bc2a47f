"""What a host says of its machine, and that the layout is chosen by it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from elastic_train.config.load import parse_job
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.machine_facts import machine_facts, node_bytes, told
from elastic_train.controller.replanning import Replanning
from elastic_train.planner.machines import Told
from tests.config.job_files import GOOD


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A driver's command of that name, first in PATH."""
    command = folder / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def test_a_cpu_host_tells_what_memory_it_may_use() -> None:
    facts = machine_facts("cpu")
    assert facts == {"name": None, "memory_bytes": None, "node_bytes": node_bytes()}
    assert 0 < node_bytes() <= psutil.virtual_memory().total
    assert told(facts) == Told(None, None, node_bytes())


def test_a_gpu_host_tells_what_its_driver_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/asked; echo "NVIDIA H100 80GB HBM3, 81559"')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    facts = machine_facts("cuda")
    assert (facts["name"], facts["memory_bytes"]) == ("NVIDIA H100 80GB HBM3", 81559 * 2**20)
    assert "--id=3" in (tmp_path / "asked").read_text().split()


@pytest.mark.parametrize("script", ["exit 9", "echo no devices were found", "true"])
def test_a_driver_that_says_nothing_useful(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, script)
    facts = machine_facts("cuda")
    assert (facts["name"], facts["memory_bytes"]) == (None, None)


@pytest.mark.parametrize("facts", [None, [], "H100", {"name": 1, "memory_bytes": "80", "node_bytes": -1}])
def test_messages_that_say_nothing_of_a_machine(facts: object) -> None:
    assert told(facts) == Told()


def test_the_layout_is_chosen_by_what_the_hosts_are() -> None:
    job = parse_job(GOOD, ["hosts.device=cuda", "hosts.max=2", "model.preset=llama3-8b", "training.precision=bf16"])

    def hosts(name: str, gibibytes: int) -> list[HostRecord]:
        about = {"pid": 1, "node": "a", "address": "", "byte_address": ("", 1), "pool": "", "joined": 0.0}
        facts = told({"name": name, "memory_bytes": gibibytes * 2**30, "node_bytes": 2**41})
        return [HostRecord(number=number, connection=None, told=facts, **about) for number in (1, 2)]  # type: ignore

    replanning = Replanning(job)
    assert replanning.choose(hosts("Tesla T4", 4)) is None
    assert "they have 3,072.0 MiB" in replanning.problem
    choice = replanning.choose(hosts("NVIDIA H200", 140))
    assert choice is not None and "NVIDIA H200: planned as h200" in choice.reason
