from __future__ import annotations

import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_train.config.operation import StorageConfig
from elastic_train.data.corpus import open_corpus
from elastic_train.data.errors import DataError
from elastic_train.data.prepare import prepare
from elastic_train.data.publish import Prepared
from elastic_train.storage.store import Store
from tests.data import killed_prepare
from tests.data.data_sets import assert_whole, contents
from tests.s3_server import S3Server

PROGRAM = """
import os, signal, sys
from elastic_train.data.corpus import open_corpus
from elastic_train.data.prepare import prepare

source, out, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
count, fsync = 0, os.fsync

def counted(fd):
    global count
    count += 1
    if count == last:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(fd)

os.fsync = counted
seen = {}
prepare(open_corpus(source), out, 300, shard_tokens=2000, batch_tokens=256, part_bytes=9000,
        progress=lambda phase, done, total: seen.setdefault(phase, done))
print(count, seen["read"], seen.get("encode"))
"""


def run(source: Path, out: Path, killed_at: int) -> list[str] | None:
    """A run that is killed at its n-th flush to disk: before a file gets its name, or after. None when it is.

    Else [number of flushes, bytes that were scanned before, bytes that were encoded before].
    """
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(source), str(out), str(killed_at)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == -signal.SIGKILL:
        return None
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
def test_runs_that_are_killed_are_gone_on_with_and_end_with_the_same_bytes(text_folder: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    first = run(text_folder, whole, 0)
    assert first is not None and first[1:] == ["0", "0"]
    expected, flushes = contents(whole), int(first[0])
    assert_whole(whole)
    out = tmp_path / "often"
    kills, last = 0, None
    for number in range(50):
        last = run(text_folder, out, 22 + number % 3)
        if last is not None:
            break
        kills += 1
        assert not (out / "manifest.json").exists() or contents(out).keys() >= expected.keys()
    assert kills >= 3 and last is not None and int(last[0]) < flushes / 2
    assert int(last[1]) > 0 and int(last[2]) > 0  # nothing that was finished was done again
    assert contents(out) == expected
    for point in (1, flushes // 3, flushes - 2, flushes):  # the last two: around the manifest
        out = tmp_path / f"killed at {point}"
        assert run(text_folder, out, point) is None
        assert run(text_folder, out, 0) is not None
        assert contents(out) == expected
        assert_whole(out)


@pytest.mark.slow
def test_a_run_into_object_storage_is_gone_on_with(
    text_folder: Path, tmp_path: Path, s3_environment: S3Server, s3_bucket: str
) -> None:
    """Killed while it reads, then while it encodes; the third one has both before it, and ends with the same bytes."""
    assert killed_prepare.run(text_folder, str(tmp_path / "alone")) is not None
    place = f"{secrets.token_hex(4)}/set"
    uri, endpoint = f"s3://{s3_bucket}/{place}", s3_environment.endpoint_url
    assert killed_prepare.run(text_folder, uri, kill="read", endpoint=endpoint) is None
    assert killed_prepare.run(text_folder, uri, kill="encode", endpoint=endpoint) is None
    store = Store.open(uri, StorageConfig(endpoint_url=endpoint))
    assert not store.exists("manifest.json") and store.list(".work/")
    last = killed_prepare.run(text_folder, uri, endpoint=endpoint)
    assert last is not None and last["read"] > 0 and last["encode"] > 0  # nothing that was finished was done again
    assert {entry.path: store.read(entry.path) for entry in store.list()} == contents(tmp_path / "alone")
    assert not list(store.unfinished())


def small(
    source: Path, out: Path, vocab_size: int = 300, overwrite: bool = False, meanwhile: object = None
) -> Prepared:
    """A run in whose middle something else happens."""
    todo = [meanwhile] if meanwhile is not None else []

    def progress(phase: str, done: int, total: int) -> None:
        if phase == "encode" and total / 2 < done < total and todo:
            todo.pop()()

    made = prepare(
        open_corpus(str(source)), str(out), vocab_size, overwrite=overwrite, progress=progress,
        shard_tokens=2000, batch_tokens=256, part_bytes=9000,
    )  # fmt: skip
    assert not todo
    return made


def test_two_runs_of_the_same_inputs_at_once(text_folder: Path, tmp_path: Path) -> None:
    """The inner one ends while the outer one is at work, and takes its work files away."""
    out = tmp_path / "out"
    made = small(text_folder, out, meanwhile=lambda: small(text_folder, out))
    assert assert_whole(out) == made.manifest
    small(text_folder, tmp_path / "alone")
    assert contents(out) == contents(tmp_path / "alone")


def test_of_two_runs_of_other_inputs_the_first_to_end_stays(text_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(DataError, match="holds a data set made from other inputs; choose another folder or allow"):
        small(text_folder, out, meanwhile=lambda: small(text_folder, out, 280))
    assert assert_whole(out).tokenizer.vocab_size == 280
    small(text_folder, tmp_path / "alone", 280)
    assert contents(out) == contents(tmp_path / "alone")


def test_of_two_runs_that_may_overwrite_the_last_to_end_stays(text_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    small(text_folder, out, 270)
    small(text_folder, out, overwrite=True, meanwhile=lambda: small(text_folder, out, 280, overwrite=True))
    assert assert_whole(out).tokenizer.vocab_size == 300
    small(text_folder, tmp_path / "alone")
    assert contents(out) == contents(tmp_path / "alone")


def test_a_data_set_is_whole_until_the_one_that_replaces_it_is(text_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    before = small(text_folder, out, 270).manifest
    files = contents(out)

    def look() -> None:
        assert files.items() <= contents(out).items()

    assert small(text_folder, out, overwrite=True, meanwhile=look).manifest != before


def test_work_files_that_are_damaged_count_for_nothing(text_folder: Path, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    out = tmp_path / "out"
    with pytest.raises(Stop):
        small(text_folder, out, meanwhile=stop)
    work = [file for file in (out / ".work").rglob("*") if file.is_file() and file.name != "tokenizer.json"]
    assert len(work) > 5
    for file in work:
        file.write_bytes(file.read_bytes()[:40])
    small(text_folder, out)
    small(text_folder, tmp_path / "alone")
    assert contents(out) == contents(tmp_path / "alone")
