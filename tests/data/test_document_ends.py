"""Documents in cuts of the stream: numbered by where they end, not by tokens that look like an end."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.data.corpus import open_corpus
from elastic_train.data.dataset import TokenDataset
from elastic_train.data.errors import DataError
from elastic_train.data.prepare import prepare
from elastic_train.data.samples import document_numbers
from tests.data.token_sets import make

FORMAT_1 = Path(__file__).parent / "format_1"
SHARDS = st.lists(st.lists(st.integers(1, 30), max_size=5).map(lambda sizes: list(accumulate(sizes))), min_size=1)


@settings(max_examples=30)
@given(SHARDS, st.integers(0, 40), st.integers(1, 50), st.sampled_from(["keep", "drop"]))
def test_documents_are_numbered_by_their_ends(
    tmp_path_factory: pytest.TempPathFactory, ends: list[list[int]], more: int, length: int, tails: str
) -> None:
    """A third of the tokens are end-of-text ones, as in conversations whose turns end with it."""
    folder = tmp_path_factory.mktemp("set")
    sizes = [own[-1] if own else 1 + more for own in ends]  # a shard without an end: its document goes on
    make(str(folder), sizes, 16, ends=ends, vocabulary=3)
    dataset = TokenDataset.open(str(folder), length, tails="keep" if tails == "keep" else "drop")
    begins = {first + end for first, own in zip(accumulate(sizes, initial=0), ends, strict=False) for end in own}
    for index in range(len(dataset)):
        ((start, used),) = dataset.pieces(index)
        expected = np.cumsum([place > start and place in begins for place in range(start, start + used)]).tolist()
        documents = dataset.sample(index).documents.tolist()
        assert documents == expected + [expected[-1] + 1] * (length - used)


def test_samples_of_texts_are_what_they_were(text_folder: Path, tmp_path: Path) -> None:
    """Where the end-of-text token ends documents and nothing else, the numbers are those that it gives."""
    prepare(open_corpus(str(text_folder)), str(tmp_path / "set"), 300)
    dataset = TokenDataset.open(str(tmp_path / "set"), 96)
    several = 0
    for index in range(len(dataset)):
        ids, _, documents = dataset.sample(index)
        assert documents.tolist() == document_numbers(ids, dataset.eos_id).tolist()
        several += documents[-1] > 0
    assert several > 20


def test_format_1_knows_the_token_only() -> None:
    whole = TokenDataset.open(str(FORMAT_1), 64).manifest.tokens - 1
    ids, _, documents = TokenDataset.open(str(FORMAT_1), whole).sample(0)
    assert documents.tolist() == document_numbers(ids, 0).tolist() and documents[-1] > 0


def test_the_ends_of_a_shard_are_read_once_and_only_for_who_wants_them(tmp_path: Path) -> None:
    make(str(tmp_path), [30, 40], 8, ends=[[10, 30], [15, 40]])
    dataset = TokenDataset.open(str(tmp_path), 12, cache_dir=tmp_path / "cache")
    first = dataset.sample(0).documents.tolist()
    (tmp_path / "shard-0.ends.arrow").unlink()
    (tmp_path / "shard-1.ends.arrow").unlink()
    assert dataset.sample(0).documents.tolist() == first == [0] * 10 + [1] * 2
    assert TokenDataset.open(str(tmp_path), 12, numbers_documents=False).sample(0).documents.tolist() == [0] * 12
    with pytest.raises(DataError, match=r"shard-1.ends.arrow is missing"):
        dataset.sample(2)


def test_processes_of_a_node_map_one_copy_of_the_ends(tmp_path: Path) -> None:
    """What one of them has put into the cache the others do not fetch; it is checked there, too."""
    make(str(tmp_path), [30], 8, ends=[[10, 30]])
    cache, file = tmp_path / "cache", tmp_path / "shard-0.ends.arrow"
    whole = file.read_bytes()
    first = TokenDataset.open(str(tmp_path), 12, cache_dir=cache).sample(0).documents.tolist()
    file.unlink()
    other = TokenDataset.open(str(tmp_path), 12, cache_dir=cache)
    assert other.sample(0).documents.tolist() == first
    (copy,) = cache.glob("?/*-ends")
    assert str(copy) in Path("/proc/self/maps").read_text()
    copy.unlink()
    assert other.sample(1).documents.tolist() == [0] * 12  # what is mapped stays
    copy.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"shard-0.ends.arrow is missing"):
        TokenDataset.open(str(tmp_path), 12, cache_dir=cache).sample(0)
