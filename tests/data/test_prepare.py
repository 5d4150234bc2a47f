from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import secrets
import shutil
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from tokenizers import AddedToken, Tokenizer

from elastic_train.config.operation import StorageConfig
from elastic_train.data.corpus import Corpus, open_corpus
from elastic_train.data.dataset import TokenDataset
from elastic_train.data.encode import EncodeTask, read_shards
from elastic_train.data.errors import DataError
from elastic_train.data.given import given_tokenizer, read_tokenizer
from elastic_train.data.parts import cut
from elastic_train.data.prepare import prepare
from elastic_train.data.publish import Prepared
from elastic_train.data.scan import KINDS, Scan, ScanTask
from elastic_train.data.stages import Advance, Orders, Task, one_by_one
from elastic_train.data.tokenizer import EOS_ID, GivenTokenizer, encode_documents, train_tokenizer
from elastic_train.storage.local import LocalStore
from elastic_train.storage.store import Store
from tests.data.data_sets import assert_whole, contents, decoded, texts_of
from tests.s3_server import S3Server


def prepare_small(
    corpus: Corpus,
    out: Path | str,
    vocab_size: int = 300,
    storage: StorageConfig | None = None,
    overwrite: bool = False,
) -> Prepared:
    """Prepared in several shards of several batches."""
    return prepare(
        corpus, str(out), vocab_size, storage=storage, overwrite=overwrite, shard_tokens=3000, batch_tokens=256
    )


def test_the_same_text_gives_the_same_bytes(text_folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert not prepare_small(open_corpus(str(text_folder)), tmp_path / name).reused
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert len(contents(tmp_path / "one")) > 4


def test_the_tokens_are_the_documents_with_an_end_after_each(text_folder: Path, tmp_path: Path) -> None:
    corpus = open_corpus(str(text_folder))
    manifest = prepare_small(corpus, tmp_path / "out").manifest
    assert decoded(tmp_path / "out") == texts_of(corpus)
    assert manifest.documents == 40 and 1 < len(manifest.shards) < 40


def test_the_manifest_describes_every_file(text_folder: Path, tmp_path: Path) -> None:
    manifest = prepare_small(open_corpus(str(text_folder)), tmp_path / "out").manifest
    assert assert_whole(tmp_path / "out") == manifest
    files = contents(tmp_path / "out")
    assert json.loads(files["manifest.json"])["format_version"] == 3
    folder = manifest.inputs_sha256[:16]
    assert {name.partition("/")[0] for name in files} == {folder, "manifest.json"}
    assert [shard.path for shard in manifest.shards[:2]] == [
        f"{folder}/shard-00000.arrow",
        f"{folder}/shard-00000-1.arrow",
    ]
    assert [shard.tokens for shard in manifest.shards[:-1]] == [3000] * (len(manifest.shards) - 1)
    assert manifest.tokenizer.vocab_size == 300 and manifest.dtype == "uint16" and not manifest.labelled
    assert [json.loads(line) for line in files[f"{folder}/left_out.jsonl"].splitlines()] == [
        {"name": "empty.txt", "reason": "empty"},
        {"name": "latin1.txt", "reason": "not UTF-8 (byte 2)"},
    ]
    assert manifest.left_out_counts == {"empty": 1, "not_utf8": 1}


def test_a_prepared_data_set_is_reused_and_others_are_kept(text_folder: Path, tmp_path: Path) -> None:
    corpus, out = open_corpus(str(text_folder)), str(tmp_path / "out")
    first = prepare_small(corpus, out)
    again = prepare_small(corpus, out)
    assert again.reused and again.manifest == first.manifest and again.digest == first.digest
    with pytest.raises(DataError, match="holds a data set made from other inputs; choose another folder or allow"):
        prepare_small(corpus, out, 301)
    (text_folder / "00.txt").write_text("changed")
    with pytest.raises(DataError, match=r"00.txt has changed while it was read: 1025 bytes, then 7"):
        prepare_small(corpus, out)
    corpus = open_corpus(str(text_folder))
    with pytest.raises(DataError, match="made from other inputs"):
        prepare_small(corpus, out)
    replaced = prepare_small(corpus, out, overwrite=True)
    assert not replaced.reused and replaced.digest != first.digest
    assert assert_whole(Path(out)) == replaced.manifest


@pytest.mark.parametrize("version", ["elastic_train.data.prepare.PREPARATION", "tokenizers.__version__"])
def test_what_another_version_has_made_is_not_reused(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    corpus, out = open_corpus(str(text_folder)), str(tmp_path / "out")
    made = prepare_small(corpus, out)
    given = given_tokenizer(Store.open(out))
    prepare(corpus, f"{out}-given", 300, given=given)
    monkeypatch.setattr(version, 99)
    with pytest.raises(DataError, match="holds a data set made from other inputs"):
        prepare_small(corpus, out)
    assert prepare_small(corpus, out, overwrite=True).manifest.inputs_sha256 != made.manifest.inputs_sha256
    if version.startswith("tokenizers"):
        assert prepare(corpus, f"{out}-given", 300, given=given).reused
    folders: set[str] = set()  # of work files, which are not gone on with either

    def look(phase: str, done: int, total: int) -> None:
        folders.update(path.name for path in tmp_path.glob("out-*/.work/*"))

    for number in (99, 100):
        monkeypatch.setattr(version, number)
        prepare(corpus, f"{out}-{number}", 300, progress=look)
    assert len(folders) == 2


def test_a_data_set_that_lost_a_shard_is_made_again(text_folder: Path, tmp_path: Path) -> None:
    corpus, out = open_corpus(str(text_folder)), tmp_path / "out"
    manifest = prepare_small(corpus, str(out)).manifest
    before = contents(out)
    ends, left_out = manifest.shards[1].ends, manifest.left_out
    assert ends is not None and left_out is not None
    for lost in (manifest.shards[1].path, ends.path, manifest.tokenizer.path, left_out.path):
        (out / lost).unlink()
        assert not prepare_small(corpus, str(out)).reused
        assert contents(out) == before


def test_progress_ends_at_the_whole_of_each_phase(text_folder: Path, tmp_path: Path) -> None:
    seen: dict[str, tuple[int, int]] = {}
    corpus = open_corpus(str(text_folder))
    made = prepare(
        corpus, str(tmp_path / "out"), 300, progress=lambda phase, done, total: seen.update({phase: (done, total)})
    )
    size, total = made.manifest.inputs["corpus_bytes"], sum(file.size for file in corpus.files)
    assert seen["tokenizer"] == seen["encode"] == (size, size)
    assert seen["read"] == (total, total)


def test_text_that_spells_the_end_token_is_text() -> None:
    tokenizer = train_tokenizer(["before after"], 257)
    ((tokens, size),) = encode_documents(tokenizer, [("before <|endoftext|> after", 26)], 0)
    assert size == 26
    assert tokens.count(0) == 1 and tokens[-1] == 0
    assert tokenizer.decode(tokens[:-1]) == "before <|endoftext|> after"


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The texts that tokenizers are trained on."""
    found: list[list[str]] = []

    def remember(texts: Iterable[str], vocab_size: int) -> Tokenizer:
        found.append(list(texts))
        return train_tokenizer(found[-1], vocab_size)

    monkeypatch.setattr("elastic_train.data.prepare.train_tokenizer", remember)
    return found


def by_hash(texts: Iterable[str]) -> list[str]:
    return sorted(set(texts), key=lambda text: xxhash.xxh3_128_digest(text.encode()))


def test_a_tokenizer_is_trained_on_the_texts_with_the_smallest_hashes(
    text_folder: Path, tmp_path: Path, trained: list[list[str]]
) -> None:
    corpus = open_corpus(str(text_folder))
    texts = by_hash(texts_of(corpus))
    total = sum(len(text.encode()) for text in texts)
    for number, wanted in enumerate((total, total // 3, 1)):
        for part_bytes in (2**26, total // 6):
            prepare(corpus, str(tmp_path / f"{number}-{part_bytes}"), 300, sample_bytes=wanted, part_bytes=part_bytes)
            assert sum(len(text.encode()) for text in trained[-1]) in range(wanted - 3, wanted + 1)  # whole characters
            assert "".join(texts).startswith("".join(trained[-1]))


def test_the_sample_is_of_text_however_little_of_the_input_is_text(
    text_folder: Path, tmp_path: Path, trained: list[list[str]]
) -> None:
    texts = texts_of(open_corpus(str(text_folder)))
    lines = [json.dumps({"text": text, "other": "x" * 50 * len(text)}) for text in [*texts, *texts]]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    size = sum(len(text.encode()) for text in texts)
    for number, part_bytes in enumerate((2**26, 2**18)):
        corpus = open_corpus(str(tmp_path / "a.jsonl"))
        prepare(corpus, str(tmp_path / f"{number}"), 300, sample_bytes=size, part_bytes=part_bytes)
        assert trained[-1] == by_hash(texts)


def test_the_first_look_keeps_no_text_but_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_train.data.streams.BLOCK", 2**16)
    with (tmp_path / "a.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": f"{number} " + "x" * 20_000}) + "\n" for number in range(500))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"x" * 10_000_000))
    with gzip.open(tmp_path / "c.jsonl.gz", "wb") as packed:
        packed.write(b'{"text": "' + b"x" * 10_000_000 + b'"}\n')
    monkeypatch.setattr("elastic_train.data.documents.DOCUMENT_BYTES", 2**17)
    corpus = open_corpus(str(tmp_path))
    task = ScanTask(corpus, tuple(cut(corpus, 2**30)), 30_000)
    tracemalloc.start()
    try:
        result = task({"part": 0, "sample_bytes": 100_000}, lambda count: None)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    scan = Scan(result)
    assert scan.kinds.tolist() == [0] * 500 + [KINDS.index("too_long")] * 2
    assert [reason for reason in scan.reasons.to_pylist() if reason] == [
        "longer than 30000 characters",
        "longer than 131072 bytes",
    ]


def test_the_second_look_holds_no_shard_of_a_compressed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_train.data.streams.BLOCK", 2**16)
    monkeypatch.setattr("elastic_train.data.tokenizer.ENCODE_BATCH_CHARACTERS", 2**14)
    monkeypatch.setattr("elastic_train.data.shards.BLOCK", 2**16)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as packed:
        packed.writelines(json.dumps({"text": f"{number} " + "one two three " * 100}) + "\n" for number in range(2000))
    corpus = open_corpus(str(tmp_path / "a.jsonl.gz"))
    parts = tuple(cut(corpus, 2**16))
    scan = Scan(ScanTask(corpus, parts, None)({"part": 0, "sample_bytes": 0}, lambda count: None))
    text = train_tokenizer(["one"], 257).to_str().encode()
    given = GivenTokenizer(text, EOS_ID)
    task = EncodeTask(corpus, parts, None, given, "uint16", 2**26, 2**12, str(tmp_path / "out"), None, "made")
    tracemalloc.start()
    try:
        result = task({"part": 0, "duplicates": [], "sha256": scan.sha256}, lambda count: None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    (shard,) = read_shards(result)
    assert len(parts) == 1 and shard.documents == 2000 and shard.tokens > 2_000_000
    assert peak < shard.bytes / 2


@pytest.mark.parametrize("part_bytes", [2**20, 1000])
def test_a_line_that_is_too_long_is_left_out_and_not_read_once_per_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr("elastic_train.data.documents.DOCUMENT_BYTES", 10_000)
    monkeypatch.setattr("elastic_train.data.streams.TAIL_BLOCK", 100)
    lines = [json.dumps({"text": text}) for text in ("one", "x" * 9_900, "y" * 90_000, "two")]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    read, count = LocalStore.read, [0]

    def counted(store: LocalStore, path: str, offset: int = 0, length: int | None = None) -> bytes:
        data = read(store, path, offset, length)
        count[0] += len(data) * path.endswith("a.jsonl")
        return data

    monkeypatch.setattr(LocalStore, "read", counted)
    prepare(open_corpus(str(tmp_path / "a.jsonl")), str(tmp_path / "out"), 300, part_bytes=part_bytes)
    assert count[0] < 3 * 100_000
    assert decoded(tmp_path / "out") == ["one", "x" * 9_900, "two"]
    (left_out,) = (tmp_path / "out").glob("*/left_out.jsonl")
    assert json.loads(left_out.read_text()) == {"name": "a.jsonl:3", "reason": "longer than 10000 bytes"}


def test_settings_and_corpora_that_make_no_data_set(text_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="vocab_size=256 is too small; byte-level BPE needs at least 257"):
        prepare(open_corpus(str(text_folder)), str(tmp_path / "out"), 256)
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(DataError, match=r"none.jsonl has no text: it has no document$"):
        prepare_small(open_corpus(str(tmp_path / "none.jsonl")), tmp_path / "out")
    (tmp_path / "empty").write_text("")
    with pytest.raises(DataError, match=r"corpus empty has no text: all of its documents are left out \(1 empty\)"):
        prepare_small(open_corpus(str(tmp_path / "empty")), tmp_path / "out")


@pytest.mark.slow
def test_s3_holds_the_same_bytes(text_folder: Path, tmp_path: Path, s3_environment: S3Server, s3_bucket: str) -> None:
    uri = f"s3://{s3_bucket}/{secrets.token_hex(4)}/data set+1"
    storage = StorageConfig(endpoint_url=s3_environment.endpoint_url)
    corpus = open_corpus(str(text_folder))
    remote = prepare_small(corpus, uri, storage=storage)
    local = prepare_small(corpus, tmp_path / "out")
    assert remote.digest == local.digest
    store = Store.open(uri, storage)
    assert {entry.path: store.read(entry.path) for entry in store.list()} == contents(tmp_path / "out")
    assert not store.unfinished()
    assert prepare_small(corpus, uri, storage=storage).reused


def hf_folder(folder: Path, text_folder: Path, eos: object) -> Path:
    """A Hugging Face folder with a tokenizer that has two special tokens; the second one ends a text."""
    tokenizer = train_tokenizer(texts_of(open_corpus(str(text_folder))), 290)
    tokenizer.add_special_tokens(["<|pad|>", "<|end|>"])
    tokenizer.enable_truncation(5)
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    (folder / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    return folder


def test_a_given_tokenizer_is_used_as_it_is(text_folder: Path, tmp_path: Path) -> None:
    corpus = open_corpus(str(text_folder))
    folder = hf_folder(tmp_path / "model", text_folder, [291, 290])
    given = read_tokenizer(Store.open(str(folder)))
    made = prepare(corpus, str(tmp_path / "out"), 300, given=given)
    entry = made.manifest.tokenizer
    assert (tmp_path / "out" / entry.path).read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert (entry.eos_id, entry.eos_token, entry.vocab_size) == (291, "<|end|>", 292)
    tokens = TokenDataset.open(str(tmp_path / "out"), 8).tokens(0, made.manifest.tokens).tolist()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    ids = tokens[: tokens.index(291)]
    assert tokenizer.decode(ids) == texts_of(corpus)[0]
    assert prepare(corpus, str(tmp_path / "out"), 300, given=given).reused
    with pytest.raises(DataError, match="holds a data set made from other inputs"):
        prepare(corpus, str(tmp_path / "out"), 300)


@pytest.mark.parametrize(("eos", "message"), [(None, "has eos_token_id=None"), (999, "has no entry 999")])
def test_a_given_tokenizer_needs_an_end_of_text(eos: object, message: str, text_folder: Path, tmp_path: Path) -> None:
    folder = Store.open(str(hf_folder(tmp_path / "model", text_folder, eos)))
    with pytest.raises(DataError, match=message):
        prepare(open_corpus(str(text_folder)), str(tmp_path / "out"), 300, given=read_tokenizer(folder))
    with pytest.raises(DataError, match=r"a tokenizer is a tokenizer\.json, a folder"):
        read_tokenizer(Store.open(str(tmp_path / "nowhere")))


def test_an_end_that_a_text_can_spell_is_refused(text_folder: Path, tmp_path: Path) -> None:
    corpus = open_corpus(str(text_folder))
    tokenizer = train_tokenizer(texts_of(corpus), 290)
    tokenizer.add_tokens([AddedToken("</s>", special=False)])
    tokenizer.add_special_tokens(["<|end|>"])
    text = tokenizer.to_str().encode()
    for eos, name in ((290, "</s>"), (tokenizer.token_to_id("Ċ"), "\\\\n")):
        with pytest.raises(DataError, match=rf"the text '{name}' is encoded as entry {eos} .*: a special token"):
            prepare(corpus, str(tmp_path / "out"), 300, given=GivenTokenizer(text, eos))
    assert prepare(corpus, str(tmp_path / "out"), 300, given=GivenTokenizer(text, 291)).manifest.tokenizer.eos_id == 291


def test_every_document_left_out_is_listed_with_its_reason(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("one two")
    lines = ("three", "one two", " ", "x" * 11, "\ud800", "three")
    (texts / "b.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    pq.write_table(pa.table({"text": ["three", None, "four"]}), texts / "c.parquet")
    (texts / "d.jsonl").write_text('{"text": "four"}\n{"text": "five"}\n')
    corpus = open_corpus(str(texts))
    for part_bytes in (2**20, 1):
        made = prepare(corpus, str(tmp_path / f"{part_bytes}"), 300, max_characters=10, part_bytes=part_bytes)
        manifest = assert_whole(tmp_path / f"{part_bytes}")
        assert decoded(tmp_path / f"{part_bytes}") == ["one two", "three", "four", "five"]
        assert made.manifest.left_out_counts == {"empty": 2, "not_utf8": 1, "too_long": 1, "duplicate": 4}
        assert manifest.left_out is not None and manifest.left_out_documents == 8
        told = (tmp_path / f"{part_bytes}" / manifest.left_out.path).read_text().splitlines()
        assert [tuple(json.loads(line).values()) for line in told] == [
            ("b.jsonl:2", "duplicate of a.txt"),
            ("b.jsonl:3", "empty"),
            ("b.jsonl:4", "longer than 10 characters (11)"),
            ("b.jsonl:5", "not UTF-8 (character 0 is half of a surrogate pair)"),
            ("b.jsonl:6", "duplicate of b.jsonl:1"),
            ("c.parquet:1", "duplicate of b.jsonl:1"),
            ("c.parquet:2", "empty"),
            ("d.jsonl:1", "duplicate of c.parquet:3"),
        ]
    kept = prepare(corpus, str(tmp_path / "kept"), 300, max_characters=10, keep_duplicates=True).manifest
    assert kept.documents == 8 and kept.left_out_counts == {"empty": 2, "not_utf8": 1, "too_long": 1}


def test_lines_are_counted_over_the_parts_of_a_file(tmp_path: Path) -> None:
    """Blank lines and lines that are left out are lines too."""
    lines = [json.dumps({"text": f"number {i % 7}"}) if i % 5 else "" for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    told = set()
    for part_bytes in (2**20, 300, 100):
        out = tmp_path / f"{part_bytes}"
        manifest = prepare(open_corpus(str(tmp_path / "a.jsonl")), str(out), 300, part_bytes=part_bytes).manifest
        assert manifest.left_out is not None
        told.add((out / manifest.left_out.path).read_bytes())
    (told_once,) = told
    entries = {entry["name"]: entry["reason"] for entry in map(json.loads, told_once.splitlines())}
    assert entries["a.jsonl:1"] == entries["a.jsonl:36"] == "empty"
    assert entries["a.jsonl:40"] == "duplicate of a.jsonl:5"


def test_the_order_in_which_parts_are_done_changes_nothing(text_folder: Path, tmp_path: Path) -> None:
    def shuffled(task: Task, orders: Orders, advance: Advance) -> Iterator[tuple[int, bytes]]:
        mixed = random.Random(1).sample(list(orders), len(orders))
        assert len(orders) > 5 and mixed != orders
        return one_by_one(pickle.loads(pickle.dumps(task)), mixed, advance)

    corpus = open_corpus(str(text_folder))
    for name, run in (("one", one_by_one), ("two", shuffled)):
        prepare(corpus, str(tmp_path / name), 300, shard_tokens=500, batch_tokens=64, part_bytes=5000, run=run)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert decoded(tmp_path / "one") == texts_of(corpus)


def test_input_that_changes_between_the_two_looks_is_refused(text_folder: Path, tmp_path: Path) -> None:
    (text_folder / "00.txt").rename(text_folder / "zz.txt")

    def change(phase: str, done: int, total: int) -> None:
        if phase == "tokenizer" and done == 0:
            (text_folder / "zz.txt").write_bytes((text_folder / "zz.txt").read_bytes().replace(b"token", b"spoke"))

    with pytest.raises(DataError, match=r"02.txt or one of the 42 files of its part has changed while it was prepared"):
        prepare(open_corpus(str(text_folder)), str(tmp_path / "out"), 300, progress=change)
    assert not (tmp_path / "out/manifest.json").exists() and not (tmp_path / "out/.work").exists()


@pytest.mark.parametrize("field", ["shard_tokens", "part_bytes", "max_characters"])
def test_settings_that_are_no_sizes(text_folder: Path, tmp_path: Path, field: str) -> None:
    with pytest.raises(DataError, match=f"{field}=0 must be at least 1"):
        prepare(open_corpus(str(text_folder)), str(tmp_path / "out"), 300, **{field: 0})


def test_output_that_is_input(text_folder: Path) -> None:
    with pytest.raises(DataError, match=r"the input .*/00.txt lies in the output .*; choose another folder"):
        prepare(open_corpus(str(text_folder)), str(text_folder), 300)


@pytest.mark.parametrize(
    ("source", "out", "apart"),
    [
        ("", "out", False),
        ("/../in", "sub/../out", False),
        ("/**/*.json", "out", False),
        ("/*/*/*.arrow", "out", False),
        ("/../link", "out", False),
        ("/*.txt", "out", True),
        ("/00.txt", "out", True),
        ("/**/*.txt", "out", True),
        ("", "../out", True),
    ],
)
def test_output_in_input_is_refused_at_first(
    text_folder: Path, tmp_path: Path, source: str, out: str, apart: bool
) -> None:
    folder = text_folder.rename(tmp_path / "in")
    (folder / "sub/deep").mkdir(parents=True)
    (folder / "sub/x.json").write_text("{}")
    (folder / "sub/deep/x.arrow").write_text("{}")
    (tmp_path / "link").symlink_to(folder)
    if not apart:
        with pytest.raises(DataError, match=r"the output .*out lies in the input; choose another folder"):
            prepare(open_corpus(f"{folder}{source}"), f"{folder}/{out}", 300)
        return
    for again in (False, True):
        assert prepare(open_corpus(f"{folder}{source}"), f"{folder}/{out}", 300).reused == again


def test_lines_of_a_file_that_is_given_twice(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    corpus = open_corpus(*[str(tmp_path / "a.jsonl")] * 2)
    manifest = prepare(corpus, str(tmp_path / "out"), 300).manifest
    assert manifest.left_out is not None
    told = (tmp_path / "out" / manifest.left_out.path).read_text().splitlines()
    assert [tuple(json.loads(line).values()) for line in told] == [
        (f"2/a.jsonl/a.jsonl:{number}", f"duplicate of 1/a.jsonl/a.jsonl:{number}") for number in (1, 2)
    ]


def test_a_data_set_of_format_1_is_only_replaced_when_that_is_allowed(text_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(Path(__file__).parent / "format_1", out)
    with pytest.raises(DataError, match=r"made from other inputs by an earlier version \(format 1\); choose another"):
        prepare_small(open_corpus(str(text_folder)), out)
    assert TokenDataset.open(str(out), 4).manifest.format_version == 1
    made = prepare_small(open_corpus(str(text_folder)), out, overwrite=True)
    assert assert_whole(out) == made.manifest


def test_files_whose_names_are_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in (b"gr\xfc.txt", b"gr\xfd.txt"):
        Path(os.fsdecode(os.fsencode(tmp_path / "in") + b"/" + name)).write_text("one two")
    manifest = prepare(open_corpus(str(tmp_path / "in")), str(tmp_path / "out"), 300).manifest
    assert manifest.documents == 1 and manifest.left_out is not None
    (line,) = (tmp_path / "out" / manifest.left_out.path).read_bytes().splitlines()
    assert json.loads(line) == {"name": "gr\udcfd.txt", "reason": "duplicate of gr\udcfc.txt"}


def test_folders_whose_names_are_not_utf_8(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/gr\xfc"))
    folder.mkdir()
    (folder / "a.txt.gz").write_bytes(gzip.compress(b"one"))
    pq.write_table(pa.table({"text": ["two"]}), tmp_path / "b.parquet")
    (tmp_path / "b.parquet").rename(folder / "b.parquet")
    made = prepare(open_corpus(str(folder)), str(tmp_path / "out"), 300)
    assert decoded(tmp_path / "out") == ["one", "two"]
    assert made.manifest.inputs["corpus"] == "gr\\xfc"
    assert prepare(open_corpus(str(folder), str(tmp_path / "out/manifest.json")), f"{folder}-2", 300).manifest.documents
