from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.data.corpus import Document, open_corpus
from elastic_train.data.errors import DataError
from elastic_train.data.manifest import Skipped


def test_a_folder_gives_every_file_or_says_why_not(text_folder: Path) -> None:
    corpus = open_corpus(str(text_folder))
    documents = list(corpus.documents())
    assert [document.name for document in documents] == sorted(
        f"{'deep/' if number % 2 else ''}{number:02d}.txt" for number in range(40)
    )
    assert corpus.skipped == [
        Skipped(name="empty.txt", reason="empty"),
        Skipped(name="latin1.txt", reason="not UTF-8 (byte 2)"),
    ]
    assert len(documents) + len(corpus.skipped) == len(corpus.names)
    assert list(corpus.documents()) == documents and len(corpus.skipped) == 2


def test_one_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("line\r\nGrüße\n".encode())
    assert list(open_corpus(str(tmp_path / "a.txt")).documents()) == [Document("a.txt", "line\r\nGrüße\n")]


def test_the_standard_library_without_its_tests() -> None:
    names = open_corpus("python-stdlib").names
    assert {"abc.py", "json/decoder.py"} <= set(names)
    assert list(names) == sorted(set(names))
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="corpus 'no/such' is not there; give python-stdlib, python-doc, or a text file"
    ):
        open_corpus("no/such")
    with pytest.raises(DataError, match="holds no files"):
        open_corpus(str(tmp_path))


@pytest.mark.skipif(any(Path("/usr/share/doc").glob("python3*/html/_sources")), reason="the Python manual is installed")
def test_a_manual_that_is_not_installed() -> None:
    with pytest.raises(DataError, match=r"corpus python-doc is not installed: .*install python3-doc"):
        open_corpus("python-doc")
