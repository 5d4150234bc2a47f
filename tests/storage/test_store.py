"""What every kind of store must do; each test runs on a local folder and on a real S3 server."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from elastic_train.storage.errors import AlreadyExists, NotFound, StorageError
from elastic_train.storage.store import Entry, Store


def test_what_is_written_is_read_back(store: Store) -> None:
    assert (
        store.write("a b/c+d.bin", [b"ab", bytearray(b"cd"), memoryview(b"ef"), np.frombuffer(b"gh", np.uint8).data])
        == 8
    )
    assert store.read("a b/c+d.bin") == b"abcdefgh"
    assert store.size("a b/c+d.bin") == 8
    assert store.exists("a b/c+d.bin")


def test_write_replaces(store: Store) -> None:
    store.write("x", [b"a long first version"])
    store.write("x", [b"second"])
    assert store.read("x") == b"second"


def test_an_empty_object(store: Store) -> None:
    assert store.write("empty", []) == 0
    assert store.read("empty") == b""
    assert store.size("empty") == 0


@pytest.mark.parametrize(
    ("offset", "length", "wanted"),
    [(0, None, b"0123456789"), (3, 4, b"3456"), (8, None, b"89"), (0, 10, b"0123456789"), (4, 0, b""), (10, None, b"")],
)
def test_ranges(store: Store, offset: int, length: int | None, wanted: bytes) -> None:
    store.write("digits", [b"0123456789"])
    assert store.read("digits", offset, length) == wanted


@pytest.mark.parametrize(("offset", "length"), [(8, 3), (11, 1), (11, None)])
def test_a_range_beyond_the_end_is_an_error_with_the_size(store: Store, offset: int, length: int | None) -> None:
    store.write("digits", [b"0123456789"])
    with pytest.raises(StorageError, match=r"digits: bytes .* wanted, but its size is 10$"):
        store.read("digits", offset, length)


def test_a_missing_object(store: Store) -> None:
    assert not store.exists("nothing")
    for call in (store.read, store.size):
        with pytest.raises(NotFound, match=r"/nothing: no such object$"):
            call("nothing")
    store.delete("nothing")


def test_a_folder_is_no_object(store: Store) -> None:
    store.write("folder/x", [b"1"])
    assert not store.exists("folder")


@pytest.mark.parametrize("path", ["", "/abs", "a//b", "../up", "a/../b", "a/", "./a"])
def test_paths_that_name_no_object(store: Store, path: str) -> None:
    with pytest.raises(StorageError, match="is not accepted"):
        store.write(path, [b"x"])


def test_of_eight_creators_exactly_one_wins(store: Store) -> None:
    start = threading.Barrier(8)

    def create(name: int, path: str) -> bool:
        start.wait()
        try:
            store.create(path, f"creator {name}".encode())
        except AlreadyExists:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        for race in range(3):
            path = f"races/{race}.json"
            won = list(pool.map(create, range(8), [path] * 8))
            assert won.count(True) == 1
            assert store.read(path) == f"creator {won.index(True)}".encode()


def test_create_keeps_what_is_there(store: Store) -> None:
    store.write("manifest", [b"first"])
    with pytest.raises(AlreadyExists, match=r"/manifest: exists already$"):
        store.create("manifest", b"second")
    assert store.read("manifest") == b"first"


def test_list_is_recursive_sorted_and_by_string_prefix(store: Store) -> None:
    for path in ("step-2.json", "step-10/rank-0 a+b", "step-10/deep/er", "other", "step"):
        store.write(path, [path.encode()])
    assert store.list("step-") == [
        Entry("step-10/deep/er", 15),
        Entry("step-10/rank-0 a+b", 18),
        Entry("step-2.json", 11),
    ]
    assert [entry.path for entry in store.list("step-10/d")] == ["step-10/deep/er"]
    assert [entry.path for entry in store.list()] == [
        "other",
        "step",
        "step-10/deep/er",
        "step-10/rank-0 a+b",
        "step-2.json",
    ]
    assert store.list("nothing/here") == []


def test_delete(store: Store) -> None:
    store.write("a/b", [b"1"])
    store.write("a/c", [b"2"])
    store.delete("a/b")
    assert [entry.path for entry in store.list()] == ["a/c"]


def test_sub_is_a_store_of_its_own(store: Store) -> None:
    inner = store.sub("jobs/one")
    inner.write("x", [b"1"])
    assert store.read("jobs/one/x") == b"1"
    assert inner.uri == f"{store.uri}/jobs/one"
    assert [entry.path for entry in inner.list()] == ["x"]


def test_a_source_that_fails_leaves_the_old_object(store: Store) -> None:
    def chunks() -> object:
        yield b"x" * 40_000_000  # more than one part of an S3 upload
        raise RuntimeError("the source broke")

    store.write("x", [b"old"])
    with pytest.raises(RuntimeError, match="the source broke"):
        store.write("x", chunks())  # type: ignore[arg-type]
    assert store.read("x") == b"old"
    assert [entry.path for entry in store.list()] == ["x"]


def test_large_objects_keep_their_bytes(store: Store) -> None:
    data = np.random.default_rng(1).integers(0, 256, 50_000_001, dtype=np.uint8)
    assert store.write(
        "large", (data[i : i + 7_000_003].data for i in range(0, len(data), 7_000_003)), len(data)
    ) == len(data)
    assert store.size("large") == len(data)
    assert store.read("large") == data.tobytes()
    assert store.read("large", 33_000_000, 1000) == data[33_000_000:33_001_000].tobytes()
