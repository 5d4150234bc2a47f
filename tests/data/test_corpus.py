from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from elastic_train.config.operation import StorageConfig
from elastic_train.data.corpus import open_corpus
from elastic_train.data.errors import DataError
from elastic_train.storage.store import Store
from tests.s3_server import S3Server


def names(*inputs: str) -> list[str]:
    return [file.name for file in open_corpus(*inputs).files]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.jsonl", "c/d.jsonl.gz", "c/e.parquet", "c/f/g.jsonl", "c/f/[1].txt"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text("x")
    return tmp_path / "tree"


def test_a_folder_gives_every_file_by_name(tree: Path) -> None:
    corpus = open_corpus(str(tree))
    assert [(file.name, file.format, file.compression) for file in corpus.files] == [
        ("a.jsonl", "jsonl", None),
        ("b.txt", "text", None),
        ("c/d.jsonl.gz", "jsonl", "gzip"),
        ("c/e.parquet", "parquet", None),
        ("c/f/[1].txt", "text", None),
        ("c/f/g.jsonl", "jsonl", None),
    ]
    assert corpus.name == "tree" and {file.size for file in corpus.files} == {1}
    assert {file.format for file in open_corpus(str(tree), format="chat").files} == {"chat"}


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.jsonl", ["a.jsonl"]),
        ("c/*", ["d.jsonl.gz", "e.parquet"]),
        ("**/*.jsonl", ["a.jsonl", "c/f/g.jsonl"]),
        ("c/**", ["d.jsonl.gz", "e.parquet", "f/[1].txt", "f/g.jsonl"]),
        ("?.txt", ["b.txt"]),
        ("[!b].jsonl", ["a.jsonl"]),
        ("[a-b].*", ["a.jsonl", "b.txt"]),
        ("c/f/[[]1].txt", ["[1].txt"]),
        ("c/f/[1].txt", ["[1].txt"]),
    ],
)
def test_globs(tree: Path, pattern: str, found: list[str]) -> None:
    assert names(f"{tree}/{pattern}") == found


def test_ends_of_names_in_capitals(tmp_path: Path) -> None:
    (tmp_path / "X.JSONL.GZ").write_bytes(b"x")
    (file,) = open_corpus(str(tmp_path)).files
    assert (file.format, file.compression) == ("jsonl", "gzip")


def test_links_are_followed_and_no_name_is_passed_over(tree: Path, tmp_path: Path) -> None:
    (tree / ".tmp-x.txt").write_text("x")
    (tmp_path / "other/deep").mkdir(parents=True)
    (tmp_path / "other/deep/x.txt").write_text("x")
    (tree / "linked").symlink_to(tmp_path / "other")
    (tree / "link.txt").symlink_to("b.txt")
    (tmp_path / "other/deep/back").symlink_to(tree / "linked/deep")
    (tmp_path / "other/up").symlink_to(tree)
    texts = [".tmp-x.txt", "b.txt", "c/f/[1].txt", "link.txt", "linked/deep/x.txt"]
    assert [name for name in names(str(tree)) if name.endswith(".txt")] == texts
    assert names(f"{tree}/**/*.txt") == texts
    (tmp_path / "alias").symlink_to(tree)
    assert names(f"{tmp_path}/alias/*.txt") == [".tmp-x.txt", "b.txt", "link.txt"]


def test_what_is_no_file_is_refused_by_name(tree: Path) -> None:
    os.mkfifo(tree / "c/pipe.log")
    for source in (str(tree), f"{tree}/c/*.log", f"{tree}/c/pipe.log"):
        with pytest.raises(DataError, match=rf"input {tree}/c/pipe.log is a named pipe; accepted are files"):
            open_corpus(source)
    (tree / "c/pipe.log").unlink()
    (tree / "dead.log").symlink_to("nowhere")
    (tree / "round.log").symlink_to("round.log")
    for source, message in (
        (str(tree), r"dead.log is a link to 'nowhere', which cannot be read \(No such file"),
        (f"{tree}/dead.log", "dead.log is a link to 'nowhere'"),
        (f"{tree}/r*", r"round.log is a link to 'round.log', which cannot be read \(Too many"),
        ("/dev/null", "input /dev/null is a device; accepted are files"),
    ):
        with pytest.raises(DataError, match=message):
            open_corpus(source)
    assert names(f"{tree}/*.txt") == ["b.txt"]  # what was not asked for may be anything


@pytest.mark.parametrize(
    ("pattern", "folders"),
    [
        ("*.txt", [""]),
        ("c/*", ["c"]),
        ("?/*.txt", ["", "c"]),
        ("?/d/*", ["", "c"]),
        ("**/*.x", ["", "c", "c/f", "other"]),
    ],
)
def test_only_folders_that_a_pattern_leads_to_are_looked_into(
    tree: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, folders: list[str]
) -> None:
    (tree / "other").mkdir()
    (tree / "other/.x").touch()
    seen, scandir = [], os.scandir

    def seeing(folder: str) -> Any:
        seen.append(os.path.relpath(folder, tree))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", seeing)
    with suppress(DataError):
        open_corpus(f"{tree}/{pattern}")
    assert sorted(seen) == [folder or "." for folder in folders]


def test_relative_inputs(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree.parent)
    assert names("tree/*.txt") == ["b.txt"] and names("*/b.txt") == ["tree/b.txt"]
    assert open_corpus("tree/*.txt").name == "tree"
    monkeypatch.chdir(tree)
    assert names("b.txt") == ["b.txt"]


def test_of_several_inputs_the_order_counts_and_names_say_which(tree: Path) -> None:
    assert names(str(tree / "c/f"), str(tree / "b.txt")) == ["f/[1].txt", "f/g.jsonl", "b.txt/b.txt"]


def test_no_two_files_have_the_same_name(tree: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "data").mkdir(parents=True)
        (tmp_path / name / "data/x.txt").write_text("x")
    assert names(f"{tmp_path}/a/data", f"{tmp_path}/b/data") == ["1/data/x.txt", "2/data/x.txt"]
    assert names(f"{tree}/b.txt", f"{tree}/*.jsonl", f"{tree}/b.txt") == [
        "1/b.txt/b.txt", "2/tree/a.jsonl", "3/b.txt/b.txt"
    ]  # fmt: skip


def test_the_standard_library_without_its_tests() -> None:
    found = names("python-stdlib")
    assert {"abc.py", "json/decoder.py"} <= set(found)
    assert found == sorted(set(found))
    assert not [name for name in found if {"test", "tests", "site-packages"} & set(name.split("/"))]


def test_inputs_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="input 'no/such' is not there; accepted are python-stdlib, "):
        open_corpus("no/such")
    with pytest.raises(DataError, match="holds no files"):
        open_corpus(str(tmp_path))
    with pytest.raises(DataError, match=r"input '.*/\*.txt' matches no files in "):
        open_corpus(str(tmp_path / "*.txt"))
    with pytest.raises(DataError, match="no input is given"):
        open_corpus()


@pytest.mark.skipif(any(Path("/usr/share/doc").glob("python3*/html/_sources")), reason="the Python manual is installed")
def test_a_manual_that_is_not_installed() -> None:
    with pytest.raises(DataError, match=r"corpus python-doc is not installed: .*install python3-doc"):
        open_corpus("python-doc")


@pytest.mark.slow
def test_object_storage(s3_environment: S3Server, s3_bucket: str) -> None:
    storage = StorageConfig(endpoint_url=s3_environment.endpoint_url)
    uri = f"s3://{s3_bucket}/{secrets.token_hex(4)}"
    store = Store.open(uri, storage)
    for name in ("a.txt", "b/c.jsonl", "b/d.txt"):
        store.write(name, [b"x"])
    for source, found in (
        (uri, ["a.txt", "b/c.jsonl", "b/d.txt"]),
        (f"{uri}/b/", ["c.jsonl", "d.txt"]),
        (f"{uri}/b/*.txt", ["d.txt"]),
        (f"{uri}/a.txt", ["a.txt"]),
    ):
        assert [file.name for file in open_corpus(source, storage=storage).files] == found
    with pytest.raises(DataError, match=f"input '{uri}/none' holds no files"):
        open_corpus(f"{uri}/none", storage=storage)
