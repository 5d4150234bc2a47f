from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_train.controller.memory_limit import MemoryCgroup, MemoryUse, MemoryWatch
from tests.cgroups import cgroup
from tests.jobs import make_job
from tests.local_job import LocalJob
from tests.recovered import assert_recovered

V1_OOM = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
V2_EVENTS = "low 0\nhigh 0\nmax 4\noom 1\noom_kill {}\noom_group_kill 0\n"


def proc(folder: Path, cgroups: str, mounts: str) -> Path:
    """A stand-in of /proc/self."""
    (folder / "proc").mkdir()
    (folder / "proc" / "cgroup").write_text(cgroups)
    (folder / "proc" / "mounts").write_text(mounts)
    return folder / "proc"


def fill(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_version_1(tmp_path: Path) -> None:
    group = tmp_path / "memory" / "job" / "1"
    fill(
        group,
        memory__oom_control=V1_OOM.format(2),
        memory__stat="cache 5\nhierarchical_memory_limit 1000\n",
        memory__max_usage_in_bytes="990\n",
    )
    mounts = f"cgroup {tmp_path}/cpu cgroup rw,cpu 0 0\ncgroup {tmp_path}/memory cgroup rw,memory 0 0\n"
    found = MemoryCgroup.of_this_process(proc(tmp_path, "4:memory:/job/1\n1:cpu:/other\n0::/\n", mounts))
    assert found is not None and found.read() == MemoryUse(kills=2, limit=1000, peak=990)
    fill(group, memory__stat=f"hierarchical_memory_limit {2**63 - 4096}\n")
    assert found.read() == MemoryUse(kills=2, limit=None, peak=990)


def test_version_2_has_the_tightest_limit_of_those_above(tmp_path: Path) -> None:
    top = tmp_path / "unified"
    fill(top / "pod", memory__max="700\n")
    fill(top / "pod" / "c", memory__events=V2_EVENTS.format(1), memory__max="max\n", memory__peak="650\n")
    found = MemoryCgroup.of_this_process(proc(tmp_path, "0::/pod/c\n", f"cgroup2 {top} cgroup2 rw 0 0\n"))
    assert found is not None and found.read() == MemoryUse(kills=1, limit=700, peak=650)


def test_inside_a_container_the_mount_is_the_group(tmp_path: Path) -> None:
    top = tmp_path / "unified"
    fill(top, memory__events=V2_EVENTS.format(0), memory__max="max\n")
    found = MemoryCgroup.of_this_process(proc(tmp_path, "0::/of/the/machine\n", f"cgroup2 {top} cgroup2 rw 0 0\n"))
    assert found is not None and found.read() == MemoryUse(kills=0, limit=None, peak=None)


def test_no_group_no_verdict(tmp_path: Path) -> None:
    assert MemoryCgroup.of_this_process(tmp_path) is None
    root = proc(tmp_path, "0::/\n", f"cgroup2 {tmp_path} cgroup2 rw 0 0\n")  # the root counts nothing
    assert MemoryCgroup.of_this_process(root) is None
    assert MemoryWatch(None).verdict() is None


def test_only_a_kill_since_the_beginning_counts(tmp_path: Path) -> None:
    fill(tmp_path, memory__events=V2_EVENTS.format(3), memory__max="700\n", memory__peak="650\n")
    watch = MemoryWatch(MemoryCgroup(tmp_path, tmp_path, unified=True))
    assert watch.verdict() is None
    fill(tmp_path, memory__events=V2_EVENTS.format(4))
    sentence = watch.verdict()
    assert sentence is not None
    assert "the limit of its cgroup is 700 bytes, the most it ever used 650 bytes" in sentence
    assert "training.recompute" in sentence
    watch.begin()
    assert watch.verdict() is None


@pytest.mark.slow
def test_trainer_that_hits_the_limit_of_its_cgroup(
    corpus: Path, reference: list[dict[str, Any]], tmp_path: Path
) -> None:
    """A host in a group with room for everything but a trainer; then the limit is lifted."""
    job = make_job(corpus, tmp_path, "memory", "hosts.max=2", "parallel.pp=1", "failure.max_errors=20")
    with cgroup("memory") as group, LocalJob(job) as run:
        host = run.start_host("a0", "a", fresh=True)  # its forkserver begins in the group
        (group / "cgroup.procs").write_text(str(host.pid))
        run.wait(lambda status: any(host["state"] == "spare" for host in status["hosts"]))
        used = int((group / "memory.usage_in_bytes").read_text())
        (group / "memory.limit_in_bytes").write_text(str(used + (12 << 20)))
        run.start_host("b1", "b")
        run.wait(lambda status: bool(run.told("trouble")))
        (group / "memory.limit_in_bytes").write_text("-1")
        assert run.finish()["state"] == "finished"
    assert_recovered(run.lines, reference, {"out_of_memory"})
    first = run.told("trouble")[0]
    assert first["cause"] == "out_of_memory"
    assert "ended: SIGKILL, killed by the kernel for want of memory: the limit of its cgroup is" in first["detail"]
    assert "host 1 (node a" in first["detail"]
    assert not run.told("host_lost")  # of all processes in the group a trainer was killed
