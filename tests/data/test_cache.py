from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import threading
import zlib
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from elastic_train.data import cache as cache_module
from elastic_train.data.cache import FOLDERS, BatchCache


def name_of(number: int) -> str:
    """A name that is kept in the cache's first folder."""
    tries = (f"{salt}-{number}" for salt in count())
    return next(name for name in tries if zlib.crc32(name.encode()) % FOLDERS == 0)


def never() -> bytes:
    raise AssertionError("was made again")


def right(data: bytes) -> bool:
    return len(data) == 1000


def kept(cache: BatchCache) -> set[int]:
    return {int(file.name.rpartition("-")[2]) for file in cache.folder.glob("*/*-*") if ".tmp" not in file.name}


def test_what_is_kept_is_not_made_again(tmp_path: Path) -> None:
    cache = BatchCache(tmp_path)
    assert cache.get(name_of(1), lambda: b"a" * 1000, right) == b"a" * 1000
    assert cache.get(name_of(1), never, right) == b"a" * 1000
    assert BatchCache(tmp_path).get(name_of(1), never, right) == b"a" * 1000


def test_what_is_not_right_is_made_again(tmp_path: Path) -> None:
    cache = BatchCache(tmp_path)
    cache.get(name_of(1), lambda: b"a" * 1000, right)
    (file,) = tmp_path.glob("0/*")
    file.write_bytes(b"a" * 500)
    assert cache.get(name_of(1), lambda: b"b" * 1000, right) == b"b" * 1000
    assert file.read_bytes() == b"b" * 1000


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    cache = BatchCache(tmp_path, limit=5000 * FOLDERS)
    for number in range(5):
        cache.get(name_of(number), lambda: b"a" * 1000, right)
        os.utime(tmp_path / "0" / name_of(number), (number, number))
    cache.get(name_of(0), never, right)  # now the most recently used
    for number in range(5, 8):
        cache.get(name_of(number), lambda: b"a" * 1000, right)
        assert len(kept(cache)) == 5
    assert kept(cache) == {0, 4, 5, 6, 7}


def test_the_limit_holds_for_several_processes_together(tmp_path: Path) -> None:
    """Each looks now and then what the others have written: twice the limit is never reached."""
    caches = [BatchCache(tmp_path, limit=64_000 * FOLDERS) for _ in range(4)]
    for number in range(400):
        caches[number % 4].get(name_of(number), lambda: b"a" * 1000, right)
        assert len(kept(caches[0])) <= 64 + 4 * (64 // cache_module.LOOK_AFTER + 1)


def test_what_a_killed_process_left_is_no_copy_and_goes(tmp_path: Path) -> None:
    cache = BatchCache(tmp_path, limit=2000 * FOLDERS)
    (tmp_path / "0").mkdir()
    left = tmp_path / "0" / ".tmp-0123456789abcdef"
    left.write_bytes(b"a" * 1000)
    os.utime(left, (1, 1))
    for number in range(3):
        assert cache.get(name_of(number), lambda: b"b" * 1000, right) == b"b" * 1000
    assert not left.exists()


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("no folder")
    cache = BatchCache(tmp_path / folder)
    assert [cache.get(name_of(1), lambda: b"a" * 1000, right) for _ in range(2)] == [b"a" * 1000] * 2


def test_mapped_bytes_are_the_files_and_stay_when_it_goes(tmp_path: Path) -> None:
    def is_right(data: bytes | memoryview) -> bool:
        return len(data) == 1000

    cache, opened = BatchCache(tmp_path), len(os.listdir("/proc/self/fd"))
    data = [cache.mapped(name_of(1), make, is_right) for make in (lambda: b"\xff" * 1000, never)]
    (file,) = tmp_path.glob("0/*")
    assert file.name in Path("/proc/self/maps").read_text() and len(os.listdir("/proc/self/fd")) == opened
    file.unlink()
    assert data == [b"\xff" * 1000] * 2
    (tmp_path / "file").write_text("no folder")
    assert BatchCache(tmp_path / "file").mapped(name_of(1), lambda: b"a" * 1000, is_right) == b"a" * 1000


def test_without_a_home_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # nobody's
    cache = BatchCache()
    assert [cache.get(name_of(1), lambda: b"a" * 1000, right) for _ in range(2)] == [b"a" * 1000] * 2


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_there_are_no_locks_it_goes_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refused(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    cache = BatchCache(tmp_path)
    assert [cache.get(name_of(1), make, right) for make in (lambda: b"a" * 1000, never)] == [b"a" * 1000] * 2


def test_what_cannot_be_marked_as_used_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a folder that another user has filled."""

    def refused(file: Path) -> None:
        raise PermissionError(errno.EPERM, "not the owner", str(file))

    cache = BatchCache(tmp_path)
    cache.get(name_of(1), lambda: b"a" * 1000, right)
    monkeypatch.setattr(os, "utime", refused)
    assert cache.get(name_of(1), never, right) == b"a" * 1000


def test_an_error_of_who_makes_it_is_the_callers(tmp_path: Path) -> None:
    cache = BatchCache(tmp_path)
    with pytest.raises(ZeroDivisionError):
        cache.get(name_of(1), lambda: bytes(1 // 0), right)
    assert cache.get(name_of(1), lambda: b"a" * 1000, right) == b"a" * 1000


def test_threads_wait_for_the_one_that_makes_it(tmp_path: Path) -> None:
    cache, made, go = BatchCache(tmp_path), [], threading.Event()

    def make() -> bytes:
        made.append(1)
        go.wait(60)
        return b"a" * 1000

    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(cache.get(name_of(1), make, right))) for _ in range(4)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join()
    assert found == [b"a" * 1000] * 4 and len(made) == 1


def hold_lock(folder: Path, name: str, ready: Any) -> None:
    def make() -> bytes:
        ready.set()
        signal.pause()
        return b""

    BatchCache(folder).get(name, make, right)


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_ends_or_stops_while_it_fetches_keeps_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: signal.Signals
) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=hold_lock, args=(tmp_path, name_of(1), ready))
    process.start()
    try:
        assert ready.wait(60)
        (held,) = tmp_path.glob("lock-*")
        with held.open("w") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert process.pid is not None
        os.kill(process.pid, end)
        if end == signal.SIGKILL:
            process.join()
        else:
            monkeypatch.setattr(cache_module, "LOCK_SECONDS", 0.1)
        assert BatchCache(tmp_path).get(name_of(1), lambda: b"a" * 1000, right) == b"a" * 1000
    finally:
        process.kill()
        process.join()
