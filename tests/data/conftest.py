from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

WORDS = [
    "the",
    "model",
    "reads",
    "a",
    "token",
    "and",
    "learns",
    "what",
    "comes",
    "next",
    "from",
    "many",
    "words",
    "of",
    "text",
]


@pytest.fixture(scope="package", autouse=True)
def cache_of_a_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The cache of data sets is not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """40 small text files, one empty, one not UTF-8."""
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    source = random.Random(1)
    for number in range(40):
        text = " ".join(source.choices(WORDS, k=200)) + f"\ndocument {number} says grüß dich.\n"
        (folder / ("deep" if number % 2 else ".") / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    (folder / "empty.txt").write_text(" \n")
    (folder / "latin1.txt").write_bytes("grüß".encode("latin-1"))
    return folder
