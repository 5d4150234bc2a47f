from __future__ import annotations

import secrets
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from elastic_train.config.operation import StorageConfig
from elastic_train.storage.errors import FutureFormat, StorageError
from elastic_train.storage.json_lines import JsonLines, read_json_lines
from elastic_train.storage.store import Store
from tests.s3_server import S3Server
from tests.storage.network import Network


def test_lines_are_read_back_in_order(store: Store) -> None:
    log = JsonLines(store, "steps.jsonl")
    lines: list[dict[str, Any]] = [{"step": n, "loss": n / 3, "text": "ä\n"} for n in range(200)]
    for line in lines:
        log.append(line)
    log.flush()
    assert read_json_lines(store, "steps.jsonl") == lines
    log.append({"step": 200})
    log.close()
    assert read_json_lines(store, "steps.jsonl") == [*lines, {"step": 200}]
    with pytest.raises(ValueError, match="closed"):
        log.append({})


def test_a_log_that_is_not_there_is_empty(store: Store) -> None:
    assert read_json_lines(store, "nothing.jsonl") == []
    JsonLines(store, "nothing.jsonl").close()
    assert not store.exists("nothing.jsonl")


def test_a_new_writer_goes_on(store: Store) -> None:
    for number in range(3):
        log = JsonLines(store, "log")
        log.append({"n": number})
        log.close()
    assert read_json_lines(store, "log") == [{"n": 0}, {"n": 1}, {"n": 2}]


@pytest.mark.parametrize("tail", [b'{"n":', b'{"n":2}'])
def test_a_torn_last_line_is_ignored_and_never_continued(store: Store, tail: bytes) -> None:
    store.write("log", [b'{"n":1}\n', tail])
    whole = [{"n": 1}] + ([{"n": 2}] if tail.endswith(b"}") else [])
    assert read_json_lines(store, "log") == whole
    log = JsonLines(store, "log")
    log.append({"n": 3})
    log.close()
    assert read_json_lines(store, "log") == [*whole, {"n": 3}]


def test_damage_before_the_last_line_is_an_error(store: Store) -> None:
    store.write("log", [b'{"n":1}\n{"n":\n{"n":3}\n'])
    with pytest.raises(StorageError, match=r"/log: line 2 is not JSON"):
        read_json_lines(store, "log")


def test_the_end_is_cut_off_and_the_log_goes_on(store: Store) -> None:
    log = JsonLines(store, "steps.jsonl")
    for step in range(1, 11):
        log.append({"step": step})
    assert log.cut(lambda line: line["step"] <= 4) == 6  # also what has not been put into storage yet
    log.flush()
    assert read_json_lines(store, "steps.jsonl") == [{"step": step} for step in range(1, 5)]
    log.append({"step": 5})
    log.close()
    assert read_json_lines(store, "steps.jsonl") == [{"step": step} for step in range(1, 6)]


def test_what_stays_of_a_long_log_is_not_looked_at_again(store: Store) -> None:
    log = JsonLines(store, "steps.jsonl")
    for step in range(1, 2001):
        log.append({"step": step, "text": "x" * (step % 97 * 40)})
    log.flush()
    looked: list[int] = []

    def keep(line: dict[str, Any]) -> bool:
        looked.append(line["step"])
        return bool(line["step"] <= 1900)

    assert log.cut(keep) == 100
    assert looked == list(range(2000, 1899, -1))
    log.append({"step": 1901})
    log.flush()
    assert [line["step"] for line in read_json_lines(store, "steps.jsonl")] == list(range(1, 1902))
    assert log.cut(lambda line: True) == 0
    assert log.cut(lambda line: False) == 1901
    assert log.cut(lambda line: False) == 0
    log.close()
    assert read_json_lines(store, "steps.jsonl") == []


def test_the_format_is_told_again_when_the_line_that_told_it_is_cut_off(store: Store) -> None:
    log = JsonLines(store, "log", format_version=1)
    log.append({"n": 1})
    log.append({"n": 2})
    assert log.cut(lambda line: False) == 2
    log.append({"n": 3})
    log.append({"n": 4})
    log.close()
    assert read_json_lines(store, "log") == [{"format_version": 1, "n": 3}, {"n": 4}]


def test_a_line_of_a_later_release_is_named_by_its_place_in_the_log(store: Store) -> None:
    store.write("log", [b'{"n":1}\n{"n":2}\n{"format_version":99,"n":3}\n'])
    for read in (JsonLines, read_json_lines):
        with pytest.raises(FutureFormat, match=r"line 3 of .*/log: is of format 99"):
            read(store, "log")


def test_a_damaged_line_cannot_be_cut_off(store: Store) -> None:
    store.write("log", [b'{"n":1}\n{"n":\n{"n":3}\n'])
    log = JsonLines(store, "log")
    with pytest.raises(StorageError, match=r"/log: (line 2|the line at byte 8) is not JSON"):
        log.cut(lambda line: line["n"] < 2)


def test_lines_from_several_threads_are_all_kept_whole(store: Store) -> None:
    log = JsonLines(store, "log", interval_seconds=0.01)

    def append(name: int) -> None:
        for number in range(50):
            log.append({"t": name, "n": number})

    threads = [threading.Thread(target=append, args=[name]) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    lines = read_json_lines(store, "log")
    assert len(lines) == 200
    for name in range(4):
        assert [line["n"] for line in lines if line["t"] == name] == list(range(50))


def test_what_is_wanted_soon_does_not_wait_for_the_interval(s3_store: Store) -> None:
    log = JsonLines(s3_store, "log", interval_seconds=3600.0)
    log.append({"n": 1})
    log.flush()
    log.append({"n": 2})
    assert log.unsaved == 1
    log.append({"n": 3}, soon=True)
    deadline = time.monotonic() + 60
    while log.unsaved and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [line["n"] for line in read_json_lines(s3_store, "log")] == [1, 2, 3]
    log.abandon()


def test_a_flush_does_not_wait_for_lines_that_come_after_it(s3_store: Store) -> None:
    log, enough, count = JsonLines(s3_store, "log", interval_seconds=3600.0), threading.Event(), 0

    def append() -> None:
        nonlocal count
        while not enough.wait(0.001):
            count += 1
            log.append({"n": count})

    thread = threading.Thread(target=append)
    thread.start()
    try:
        for _ in range(5):
            before = count
            log.flush(timeout=30)
            assert len(read_json_lines(s3_store, "log")) >= before
    finally:
        enough.set()
        thread.join()
    log.close()
    assert [line["n"] for line in read_json_lines(s3_store, "log")] == list(range(1, count + 1))


def test_a_full_disk_keeps_lines_until_there_is_room(small_disk: Path) -> None:
    store = Store.open(str(small_disk))
    log = JsonLines(store, "log")
    log.append({"n": 1})
    (small_disk / "ballast").write_bytes(b"x" * (2**20 - 4096))
    for number in range(2, 202):
        log.append({"n": number, "text": "x" * 100})  # must not stop the caller
    with pytest.raises(
        StorageError, match=r"/log: \d+ new lines are not in storage yet: cannot append to it: No space"
    ):
        log.flush()
    assert log.error is not None
    (small_disk / "ballast").unlink()
    log.close()
    assert [line["n"] for line in read_json_lines(store, "log")] == list(range(1, 202))


@pytest.mark.slow
def test_lines_outlive_an_outage(s3_environment: S3Server, s3_bucket: str) -> None:
    uri = f"s3://{s3_bucket}/{secrets.token_hex(4)}"
    network = Network(s3_environment)
    network.mend()
    config = StorageConfig(endpoint_url=network.endpoint_url, retry_seconds=0.1)
    log = JsonLines(Store.open(uri, config), "log", interval_seconds=0.01)
    log.append({"n": 1})
    log.flush()
    network.cut()
    for number in range(2, 100):
        log.append({"n": number})
    with pytest.raises(
        StorageError, match=r"/log: \d+ new lines are not in storage yet: the server could not be reached"
    ):
        log.flush()
    assert "could not be reached" in str(log.error)
    network.mend()
    log.append({"n": 100})
    log.close()
    assert log.error is None
    direct = Store.open(uri, StorageConfig(endpoint_url=s3_environment.endpoint_url))
    assert [line["n"] for line in read_json_lines(direct, "log")] == list(range(1, 101))
    network.cut()


@pytest.mark.slow
def test_close_reports_lines_that_never_arrived(s3_environment: S3Server, s3_bucket: str) -> None:
    uri = f"s3://{s3_bucket}/{secrets.token_hex(4)}"
    network = Network(s3_environment)
    network.mend()
    config = StorageConfig(endpoint_url=network.endpoint_url, retry_seconds=30.0)
    log = JsonLines(Store.open(uri, config), "log")
    network.cut()
    log.append({"n": 1})
    with pytest.raises(
        StorageError, match=r"/log: 1 new lines are not in storage yet: not written within 0\.2 seconds"
    ):
        log.close(timeout=0.2)


def test_an_abandoned_log_is_its_next_writers(store: Store) -> None:
    old = JsonLines(store, "log", interval_seconds=0.01)
    old.append({"n": 1})
    old.flush()
    new = JsonLines(store, "log", interval_seconds=0.01)
    old.abandon()
    old.append({"n": "late"})
    new.append({"n": 2})
    new.close()
    old.close()
    assert [line["n"] for line in read_json_lines(store, "log")] == [1, 2]
