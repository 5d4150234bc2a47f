from __future__ import annotations

import hashlib
import subprocess
import sys
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
from elastic_train.data.record_batches import decode_batch
from elastic_train.data.samples import PADDING_LABEL
from elastic_train.storage.store import Store
from tests.data.token_sets import Array, make

FORMAT_1 = Path(__file__).parent / "format_1"
SIZES = st.lists(st.integers(1, 70), min_size=1, max_size=5)


@settings(max_examples=30)
@given(SIZES, st.integers(1, 40), st.integers(1, 30), st.sampled_from(["uint16", "uint32"]))
def test_samples_are_the_flat_stream_across_all_borders(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], batch_tokens: int, length: int, dtype: str
) -> None:
    folder = tmp_path_factory.mktemp("set")
    _, flat = make(str(folder), sizes, batch_tokens, dtype)
    dataset = TokenDataset.open(str(folder), length)
    assert len(dataset) == (len(flat) - 1) // length
    for index in range(len(dataset)):
        sample = dataset.sample(index)
        assert {array.dtype for array in sample} == {np.dtype(np.int64)}
        start = index * length
        assert sample.input_ids.tolist() == flat[start : start + length].tolist()
        assert sample.labels.tolist() == flat[start + 1 : start + length + 1].tolist()
    for outside in (-1, len(dataset)):
        with pytest.raises(IndexError, match=f"sample {outside} is outside"):
            dataset.sample(outside)


def test_the_rest_of_a_stream_can_be_kept(tmp_path: Path) -> None:
    _, flat = make(str(tmp_path), [30, 13], 8)
    dataset = TokenDataset.open(str(tmp_path), 16, tails="keep")
    ids, labels, documents = dataset.sample(2)
    assert len(dataset) == 3
    assert ids.tolist() == [*flat[32:42].tolist(), *[0] * 6]
    assert labels.tolist() == [*flat[33:43].tolist(), *[PADDING_LABEL] * 6]
    assert documents[9] < documents[10] == documents[15]


def runs(dataset: TokenDataset) -> list[tuple[Array, Array]]:
    """(inputs, labels) of every document or piece of one in all samples, after checks of what is around them."""
    found = []
    for index in range(len(dataset)):
        ids, labels, documents = dataset.sample(index)
        used = sum(length for _, length in dataset.pieces(index))
        assert (labels[used:] == PADDING_LABEL).all() and not ids[used:].any()
        assert documents[0] == 0 and set(np.diff(documents)) <= {0, 1}
        pieces = dataset.pieces(index)
        assert documents[:used].tolist() == [number for number, (_, size) in enumerate(pieces) for _ in range(size)]
        assert (documents[used:] == len(pieces)).all()
        places = [*accumulate((size for _, size in pieces), initial=0)]
        found += [(ids[place : place + size], labels[place : place + size]) for place, (_, size) in
                  zip(places, pieces, strict=False)]  # fmt: skip
    return found


@settings(max_examples=30)
@given(st.lists(SIZES, min_size=1, max_size=3), st.integers(1, 20), st.sampled_from(["documents", "none"]))
def test_documents_are_whole_and_each_is_there_once(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[list[int]], length: int, packing: str
) -> None:
    folder = tmp_path_factory.mktemp("set")
    ends = [list(accumulate(shard)) for shard in sizes]
    _, flat = make(str(folder), [sum(shard) for shard in sizes], 16, ends=ends)
    dataset = TokenDataset.open(str(folder), length, None, folder / "cache", packing=packing, tails="keep")
    documents = np.split(flat, list(accumulate(size for shard in sizes for size in shard))[:-1])
    expected = sorted(
        (document[start : start + length + 1].tolist()[:-1], document[start + 1 : start + length + 1].tolist())
        for document in documents
        for start in range(0, len(document) - 1, length)
    )
    assert sorted((ids.tolist(), labels.tolist()) for ids, labels in runs(dataset)) == expected
    if packing == "none":
        assert len(dataset) == len(expected)


def test_a_document_may_cross_into_the_next_shard(tmp_path: Path) -> None:
    """Two documents, of 25 and 20 tokens; the first shard has the end of none."""
    _, flat = make(str(tmp_path), [20, 25], 8, ends=[[], [5, 25]])
    dataset = TokenDataset.open(str(tmp_path), 24, None, tmp_path / "cache", packing="none")
    assert [dataset.pieces(index) for index in range(len(dataset))] == [[(0, 24)], [(25, 19)]]
    assert dataset.sample(0).labels.tolist() == flat[1:25].tolist()


def test_dropped_rests_are_those_of_documents_that_were_cut(tmp_path: Path) -> None:
    make(str(tmp_path), [30], 8, ends=[[5, 30]])
    dataset = TokenDataset.open(str(tmp_path), 10, None, tmp_path / "cache", packing="documents", tails="drop")
    assert sorted(piece for index in range(len(dataset)) for piece in dataset.pieces(index)) == [
        (0, 4),
        (5, 10),
        (15, 10),
    ]


@pytest.mark.parametrize("packing", ["stream", "documents", "none"])
def test_tokens_that_are_not_to_be_learned_are_no_labels(tmp_path: Path, packing: str) -> None:
    counts = (np.arange(40) % 3 == 0).astype(np.uint8)
    make(str(tmp_path), [25, 15], 8, ends=[[12, 25], [15]], counts=counts)
    dataset = TokenDataset.open(str(tmp_path), 7, None, tmp_path / "cache", packing=packing)
    for index in range(len(dataset)):
        ids, labels, _ = dataset.sample(index)
        place = 0
        for start, length in dataset.pieces(index):
            expected = dataset.tokens(start + 1, length)
            counted = counts[start + 1 : start + 1 + length] == 1
            assert (labels[place : place + length][counted] == expected[counted]).all()
            assert (labels[place : place + length][~counted] == PADDING_LABEL).all()
            assert ids[place : place + length].tolist() == dataset.tokens(start, length).tolist()
            place += length


def test_a_packing_is_worked_out_once(tmp_path: Path) -> None:
    """Each shard's is in the node's cache: its file of ends is not looked at again; a spoilt copy is made anew."""
    make(str(tmp_path / "set"), [30, 40], 8, ends=[[10, 22], [15, 40]])
    ends = [tmp_path / "set" / f"shard-{number}.ends.arrow" for number in (0, 1)]

    def pieces() -> list[list[tuple[int, int]]]:
        made = TokenDataset.open(str(tmp_path / "set"), 12, None, tmp_path / "cache", packing="documents")
        return [made.pieces(index) for index in range(len(made))]

    def kept() -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in (tmp_path / "cache").glob("*/*-pack")}

    second = ends[1].read_bytes()
    ends[1].unlink()
    with pytest.raises(DataError, match=r"shard-1.ends.arrow is missing"):
        pieces()
    (first,) = kept()  # what was done stays done
    ends[0].unlink()
    ends[1].write_bytes(second)
    found, whole = pieces(), kept()
    assert len(whole) == 2
    other = next(file for file in whole if file != first)
    other.unlink()  # a mapped file is never written to
    other.write_bytes(whole[other][:30] + b"x" + whole[other][31:])
    assert pieces() == found and kept() == whole
    ends[1].unlink()
    assert pieces() == found


def test_whoever_waits_for_a_packing_hears_of_each_shard(tmp_path: Path) -> None:
    make(str(tmp_path / "set"), [30, 40, 20], 8)
    for packing, expected in (("documents", 3), ("stream", 0)):
        told: list[int] = []
        TokenDataset.open(
            str(tmp_path / "set"), 12, None, tmp_path, packing=packing, on_progress=lambda told=told: told.append(1)
        )  # fmt: skip
        assert len(told) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.unlink(), "file {file} is missing"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1] + b"x"), "file {file} is damaged: its sha256 is not "),
    ],
)
def test_ends_of_documents_are_checked(tmp_path: Path, change: object, message: str) -> None:
    make(str(tmp_path), [30, 40], 8)
    file = tmp_path / "shard-1.ends.arrow"
    change(file)  # type: ignore[operator]
    with pytest.raises(DataError, match=message.format(file=file)):
        TokenDataset.open(str(tmp_path), 12, None, tmp_path / "cache", packing="documents")
    TokenDataset.open(str(tmp_path), 12)  # a stream does without them


def test_format_1_has_streams_only() -> None:
    dataset = TokenDataset.open(str(FORMAT_1), 16)
    assert dataset.sample(len(dataset) - 1).labels.shape == (16,)
    with pytest.raises(DataError, match=r"is of format 1, .*prepare it anew, or use data.packing=stream"):
        TokenDataset.open(str(FORMAT_1), 16, packing="none")


def test_one_ranged_read_fetches_one_batch(tmp_path: Path) -> None:
    manifest, flat = make(str(tmp_path), [1000, 77], 300)
    store = Store.open(str(tmp_path))
    read = [
        decode_batch(store.read(shard.path, offset, size), manifest.dtype).tokens
        for shard in manifest.shards
        for offset, size in shard.batches
    ]
    assert [len(batch) for batch in read] == [300, 300, 300, 100, 77]
    assert np.concatenate(read).tolist() == flat.tolist()


def test_the_digest_is_that_of_the_manifest_file(tmp_path: Path) -> None:
    make(str(tmp_path), [50], 20)
    dataset = TokenDataset.open(str(tmp_path), 8)
    assert dataset.digest == hashlib.sha256((tmp_path / "manifest.json").read_bytes()).hexdigest()
    assert dataset.vocab_size == 2**16


def test_a_folder_without_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"has no manifest.json; prepare the data set with `elastic-train data prepare`"
    ):
        TokenDataset.open(str(tmp_path), 8)


def test_opening_opens_no_shard(tmp_path: Path) -> None:
    make(str(tmp_path), [50, 30], 20)
    for shard in ("shard-0", "shard-1"):
        (tmp_path / shard).unlink()
    dataset = TokenDataset.open(str(tmp_path), 8)
    with pytest.raises(DataError, match=rf"shard {tmp_path}/shard-0 is missing"):
        dataset.sample(0)


def test_a_token_that_the_tokenizer_does_not_have_is_never_given_out(tmp_path: Path) -> None:
    manifest, flat = make(str(tmp_path), [50, 50], batch_tokens=20)
    limit = int(flat.max())
    small = manifest.tokenizer.model_copy(update={"vocab_size": limit})
    damaged = manifest.model_copy(update={"tokenizer": small})
    (tmp_path / "manifest.json").write_bytes(damaged.to_bytes())
    dataset = TokenDataset.open(str(tmp_path), 10)
    shard, place = divmod(int(flat.argmax()), 50)
    message = f"{tmp_path}/shard-{shard} has the token {limit}, the tokenizer only {limit}: it is damaged"
    with pytest.raises(DataError, match=message):
        dataset.tokens(shard * 50 + place, 1)


def test_damaged_local_batches_are_named(tmp_path: Path) -> None:
    manifest, flat = make(str(tmp_path), [50, 30], 20)
    file = tmp_path / "shard-1"
    whole = file.read_bytes()
    offset, size = manifest.shards[1].batches[1]
    file.write_bytes(whole[: offset + size - 1] + bytes([whole[offset + size - 1] ^ 1]) + whole[offset + size :])
    dataset = TokenDataset.open(str(tmp_path), 10)
    assert dataset.tokens(0, 70).tolist() == flat[:70].tolist()  # the batches before it are whole
    message = rf"shard {file} is damaged: batch 1 \(bytes {offset} to {offset + size}\) was read 2 times, xxh3 "
    with pytest.raises(DataError, match=message):
        dataset.tokens(65, 6)
    file.write_bytes(whole[: offset + size - 1])
    with pytest.raises(DataError, match=rf"shard {file} has {offset + size - 1} bytes, the manifest says {len(whole)}"):
        dataset.tokens(65, 6)
    file.write_bytes(whole)
    assert dataset.tokens(65, 6).tolist() == flat[65:71].tolist()


def test_too_few_tokens_for_one_sample(tmp_path: Path) -> None:
    make(str(tmp_path), [8], 20)
    assert len(TokenDataset.open(str(tmp_path), 8)) == 0
    assert len(TokenDataset.open(str(tmp_path), 7)) == 1


def test_reading_imports_no_pandas(text_folder: Path, tmp_path: Path) -> None:
    """Each new trainer would pay half a second for it."""
    prepare(open_corpus(str(text_folder)), str(tmp_path / "data"), 300)
    program = (
        "import sys; from elastic_train.data.dataset import TokenDataset; "
        f"TokenDataset.open({str(tmp_path / 'data')!r}, 8, packing='documents').sample(0); "
        "sys.exit('pandas' in sys.modules)"
    )
    environment = {"PATH": "", "PYTHONPATH": ":".join(sys.path), "XDG_CACHE_HOME": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", program], check=False, env=environment).returncode == 0
