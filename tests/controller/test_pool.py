from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from elastic_train.controller.pool import PREFIX, Pool, machine_wide, sweep
from tests.controller.processes import Program, program
from tests.jobs import make_job

HOST = """
import sys
from elastic_train.controller.pool import Pool
node, run, job = [*sys.argv[2:], *("node", "run", "job")[len(sys.argv[2:]):]]
pool = Pool(sys.argv[1], job, run, node)
pool.enter()
print(pool.path, flush=True)
for line in sys.stdin:
    pool.leave() if line == "leave\\n" else pool.enter()
    print("done", flush=True)
"""


def started(host: Program) -> Path:
    return Path(host.hear())


def order(host: Program, what: str) -> None:
    host.tell(what)
    assert host.hear() == "done"


def test_two_hosts_share_a_nodes_pool_and_the_last_one_out_removes_it(tmp_path: Path) -> None:
    with program(HOST, str(tmp_path), "node-a") as first, program(HOST, str(tmp_path), "node-a") as second:
        pool = started(first)
        assert started(second) == pool
        (pool / "image").write_bytes(b"of both")
        order(first, "leave")
        assert (pool / "image").read_bytes() == b"of both"
        order(second, "leave")
        assert not list(tmp_path.iterdir())


def test_each_node_has_its_own_pool_that_only_its_user_can_read(tmp_path: Path) -> None:
    with program(HOST, str(tmp_path), "node-a") as first, program(HOST, str(tmp_path), "node-b") as second:
        pools = {started(first), started(second)}
        assert pools == {tmp_path / f"{PREFIX}job-run-node-a", tmp_path / f"{PREFIX}job-run-node-b"}
        assert {pool.stat().st_mode & 0o777 for pool in pools} == {0o700}
        order(first, "leave")
        assert [path.name for path in tmp_path.iterdir()] == [f"{PREFIX}job-run-node-b"]


def test_the_pool_of_killed_hosts_is_swept_by_another_run_after_a_while(tmp_path: Path) -> None:
    """Not at once: a job whose hosts were all killed needs it when they are replaced, some seconds later."""
    with program(HOST, str(tmp_path), "node-a") as killed:
        pool = started(killed)
        (pool / "image").write_bytes(b"x" * 10_000)
        killed.kill()
        assert pool.exists()
    with program(HOST, str(tmp_path), "node-b") as other:
        assert {pool, started(other)} == set(tmp_path.iterdir())  # the same run may still need its snapshots
        order(other, "leave")
    with program(HOST, str(tmp_path), "node-b", "next-run", "next-job") as comer:
        assert {pool, started(comer)} == set(tmp_path.iterdir())
        order(comer, "leave")
    for marker in pool.glob("found-dead"):
        os.utime(marker, (0, 0))
    with program(HOST, str(tmp_path), "node-b", "next-run", "next-job") as comer:
        assert [started(comer)] == list(tmp_path.iterdir())


def test_the_next_submission_of_a_job_sweeps_what_the_ones_before_it_left(tmp_path: Path) -> None:
    """It has fenced them; a job whose name only begins like it keeps its own."""
    with program(HOST, str(tmp_path), "node-a", "run", "name-b-0b") as other:
        kept = started(other)
        other.kill()
    with program(HOST, str(tmp_path), "node-a", "run", "name-0a") as killed:
        left = started(killed)
        killed.kill()
    with program(HOST, str(tmp_path), "node-a", "next-run", "name-0a") as comer:
        assert {kept, started(comer)} == set(tmp_path.iterdir())
        assert left not in tmp_path.iterdir()


def test_two_storages_may_have_a_job_of_one_name(tmp_path: Path) -> None:
    here, there = (make_job(tmp_path / "data", tmp_path / name, "same") for name in ("here", "there"))
    assert machine_wide(here) == machine_wide(make_job(tmp_path / "data", f"{tmp_path}/here/", "same"))
    assert machine_wide(here) != machine_wide(there)
    assert machine_wide(here).startswith("same-")


def test_a_host_that_comes_in_time_keeps_the_pool_for_good(tmp_path: Path) -> None:
    with program(HOST, str(tmp_path), "node-a") as killed:
        pool = started(killed)
        killed.kill()
    assert sweep(tmp_path) == []
    with program(HOST, str(tmp_path), "node-a") as comer:
        assert started(comer) == pool
        comer.kill()
    assert not (pool / "found-dead").exists()
    assert sweep(tmp_path, patience=60) == []  # counted anew
    assert sweep(tmp_path, ended="job-other") == []
    assert sweep(tmp_path, ended="job-run") == [pool]


def test_a_host_that_has_ended_counts_as_dead_before_its_parent_notices(tmp_path: Path) -> None:
    """A killed process stays in the process table until its parent waits for it."""
    with program(HOST, str(tmp_path), "node-a") as killed:
        pool = started(killed)
        os.kill(killed.pid, 9)
        os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is a zombie
        assert sweep(tmp_path, patience=0) == [pool]


def test_a_living_hosts_pool_is_never_swept(tmp_path: Path) -> None:
    with program(HOST, str(tmp_path), "node-a") as living, program(HOST, str(tmp_path), "node-a") as killed:
        pool = started(living)
        started(killed)
        killed.kill()
        os.utime(pool, (0, 0))
        assert sweep(tmp_path, patience=0) == []
        with program(HOST, str(tmp_path), "node-b") as comer:
            started(comer)
        assert pool.exists()
        order(living, "leave")
        assert not pool.exists()  # the marker that the killed one left does not keep it


def test_the_next_host_of_a_node_keeps_what_a_killed_one_has_left(tmp_path: Path) -> None:
    with program(HOST, str(tmp_path), "node-a") as killed:
        pool = started(killed)
        (pool / "image").write_bytes(b"to adopt")
        killed.kill()
    with program(HOST, str(tmp_path), "node-a") as comer:
        assert started(comer) == pool
        assert (pool / "image").read_bytes() == b"to adopt"


def test_a_reused_pid_counts_as_dead(tmp_path: Path) -> None:
    """The marker of a process that had the pid of a living one, but started at another time."""
    pool = Pool(str(tmp_path), "job", "run", "node")
    pool.enter()
    (marker,) = pool.path.glob("owner-*")
    _, pid, began = marker.name.split("-")
    assert int(pid) == os.getpid()
    assert sweep(tmp_path, patience=0) == []
    marker.rename(marker.with_name(f"owner-{pid}-{int(began) - 1}"))
    assert sweep(tmp_path, patience=0) == [pool.path]


def test_a_marker_does_not_depend_on_the_clock(tmp_path: Path) -> None:
    """A host must not look dead because the machine's clock was set after it started: it counts ticks since boot."""
    pool = Pool(str(tmp_path), "job", "run", "node")
    pool.enter()
    (marker,) = pool.path.glob("owner-*")
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    assert marker.name == f"owner-{os.getpid()}-{fields[19]}"
    pool.leave()


@pytest.mark.parametrize("marker", ["owner-", "owner-x-1", "owner-99999999999999999999-1", "owner-1", "owner--1-5"])
def test_a_strange_marker_is_no_living_owner(tmp_path: Path, marker: str) -> None:
    folder = tmp_path / f"{PREFIX}strange"
    folder.mkdir()
    (folder / marker).touch()
    assert sweep(tmp_path, patience=0) == [folder]


def test_a_folder_that_its_host_did_not_live_to_mark_is_swept(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}unmarked").mkdir()
    assert sweep(tmp_path, patience=0) == [tmp_path / f"{PREFIX}unmarked"]
    assert sweep(tmp_path / "no such folder") == []


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "other-thing").mkdir()
    os.utime(tmp_path / "other-thing", (0, 0))
    (tmp_path / f"{PREFIX}a-file").touch()
    os.utime(tmp_path / f"{PREFIX}a-file", (0, 0))
    sweep(tmp_path, patience=0)
    assert (tmp_path / "other-thing").exists()


CROWD = """
import sys
from pathlib import Path
from elastic_train.controller.pool import Pool
sys.stdin.readline()
for _ in range(300):
    pool = Pool(sys.argv[1], "job", "run", "node")
    pool.enter()
    mine = pool.path / f"mine-{sys.argv[2]}"
    mine.write_text("x")
    assert mine.read_text() == "x" and list(pool.path.glob("owner-*"))
    mine.unlink()
    pool.leave()
print("fine", flush=True)
"""


def test_hosts_that_come_and_go_at_once_never_lose_their_pool(tmp_path: Path) -> None:
    """Two hosts of one node enter and leave while a third process sweeps: what is newborn is left alone."""
    with program(CROWD, str(tmp_path), "0") as left, program(CROWD, str(tmp_path), "1") as right:
        for host in (left, right):
            host.tell()
        while left.process.poll() is None and right.process.poll() is None:
            assert sweep(tmp_path, patience=0) == []
        assert [left.hear(), right.hear()] == ["fine", "fine"]
    assert not list(tmp_path.iterdir())


AS_ANOTHER_USER = """
import os, sys
from elastic_train.controller.pool import Pool, sweep
from pathlib import Path
pool = Pool(sys.argv[1], "job", "run", "node-a")
os.setgid(65534)
os.setuid(65534)
pool.enter()
print(pool.path, flush=True)
print(sweep(Path(sys.argv[1]), patience=0), flush=True)
sys.stdin.readline()
pool.leave()
print("done", flush=True)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be two users")
def test_the_folders_of_other_users_are_left_alone_and_stop_nobody() -> None:
    """In the memory file system that all users of a machine share, whose folders only they can read."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        root = Path(shared)
        root.chmod(0o1777)
        foreign = root / f"{PREFIX}other-run0-node"
        foreign.mkdir(mode=0o700)
        os.chown(foreign, 65533, 65533)
        with program(AS_ANOTHER_USER, shared) as host:
            pool = started(host)
            assert pool.stat().st_uid == 65534
            assert host.hear() == "[]"
            host.tell()
            assert host.hear() == "done"
        assert list(root.iterdir()) == [foreign]
