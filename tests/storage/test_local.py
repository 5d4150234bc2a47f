from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_train.storage.errors import NotFound, StorageError
from elastic_train.storage.store import Store


def test_opening_storage_imports_no_client_library() -> None:
    code = (
        "import sys\nfrom elastic_train.storage.store import Store\nimport elastic_train.storage.json_lines\n"
        "Store.open('/nowhere')\n"
        "print([m for m in ('boto3', 'botocore', 'pyarrow', 'numpy', 'pydantic', 'tenacity') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_uris_of_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a b+c"
    Store.open(str(folder)).write("x", [b"1"])
    monkeypatch.chdir(tmp_path)
    quoted = f"file://{tmp_path}/a%20b+c"
    for uri in ("a b+c", f"file://{folder}", quoted, f"file://localhost{folder}", Store.open("a b+c").uri):
        store = Store.open(uri)
        assert store.read("x") == b"1"
        assert store.local_path("x") == folder / "x"


@pytest.mark.parametrize("uri", ["gs://bucket/x", "file://host/x", "", "s3://", "s3:///x"])
def test_uris_that_are_refused(uri: str) -> None:
    with pytest.raises(StorageError):
        Store.open(uri)


def test_append_adds_to_the_end(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    store.append("logs/a", b"1\n")
    store.append("logs/a", b"2\n")
    assert store.read("logs/a") == b"1\n2\n"


def test_nothing_is_visible_before_a_write_ends(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    store.write("x", [b"old"])
    seen: list[object] = []

    def chunks() -> object:
        yield b"half of the new bytes"
        seen.extend([store.read("x"), [entry.path for entry in store.list()]])
        yield b" and the rest"

    store.write("x", chunks())  # type: ignore[arg-type]
    assert seen == [b"old", ["x"]]
    assert os.listdir(tmp_path) == ["x"]


def test_a_killed_writer_leaves_the_old_object(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    store.write("x", [b"old"])
    code = (
        "import os, signal, sys\nfrom elastic_train.storage.store import Store\n"
        "def chunks():\n    yield b'new'\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "Store.open(sys.argv[1]).write('x', chunks())"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == -9
    assert store.read("x") == b"old"
    assert [entry.path for entry in store.list()] == ["x"]


def test_deleting_the_last_object_removes_its_folders(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    store.write("a/b/c", [b"1"])
    store.delete("a/b/c")
    assert os.listdir(tmp_path) == []


def test_a_file_in_the_way_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("not a folder")
    with pytest.raises(StorageError, match=r"/runs/x: cannot write it: "):
        Store.open(str(tmp_path / "runs")).write("x", [b"1"])


def test_there_is_nothing_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("not a folder")
    store = Store.open(str(tmp_path / "runs"))
    assert (store.exists("x"), store.list(), store.list("x/")) == (False, [], [])
    for ask in (store.read, store.size):
        with pytest.raises(NotFound, match="/runs/x: no such object"):
            ask("x")


def test_a_full_disk_is_one_sentence_and_keeps_what_was_there(small_disk: Path) -> None:
    store = Store.open(str(small_disk))
    store.write("x", [b"old"])
    store.append("log", b"line 1\n")
    with pytest.raises(StorageError) as caught:
        store.write("x", [b"n" * 2_000_000])
    assert str(caught.value) == f"{small_disk}/x: cannot write it: {os.strerror(errno.ENOSPC)}"
    with pytest.raises(StorageError, match="cannot append to it: No space left on device"):
        store.append("log", b"n" * 2_000_000)
    assert store.read("x") == b"old"
    assert store.read("log") == b"line 1\n"
    assert [entry.path for entry in store.list()] == ["log", "x"]
    assert sorted(os.listdir(small_disk)) == ["log", "x"]


def test_a_full_disk_takes_nothing_by_halves_and_goes_on_when_there_is_room(small_disk: Path) -> None:
    """Of every way to write: the sentence, nothing to be seen of it, and all its room free again."""
    store = Store.open(str(small_disk))
    store.write("ballast", [b"b" * 700_000])
    for path, call in {
        "checkpoints/a": lambda path: store.write(path, (b"n" * 100_000 for _ in range(20))),
        "checkpoints/b": lambda path: store.create(path, b"n" * 2_000_000),
        "log": lambda path: store.append(path, b"n" * 2_000_000),
    }.items():
        verb = {"log": "append to"}.get(path, "create" if path.endswith("b") else "write")
        with pytest.raises(StorageError) as caught:
            call(path)
        assert str(caught.value) == f"{small_disk}/{path}: cannot {verb} it: {os.strerror(errno.ENOSPC)}"
        assert [entry.path for entry in store.list() if entry.size] == ["ballast"]
        assert store.unfinished() == []
    assert store.write("checkpoints/a", [b"n" * 250_000]) == 250_000  # only fits if nothing was left behind
    store.delete("ballast")
    store.create("checkpoints/b", b"n" * 600_000)
    assert store.size("checkpoints/b") == 600_000
