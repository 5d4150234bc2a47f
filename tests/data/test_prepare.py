from __future__ import annotations

import hashlib
import json
import secrets
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from elastic_train.config.operation import StorageConfig
from elastic_train.data.corpus import Corpus, open_corpus
from elastic_train.data.dataset import TokenDataset
from elastic_train.data.errors import DataError
from elastic_train.data.prepare import Prepared, prepare
from elastic_train.data.tokenizer import encode_documents, read_tokenizer, sample_documents, train_tokenizer
from elastic_train.storage.store import Store
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


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_same_text_gives_the_same_bytes(text_folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert not prepare_small(open_corpus(str(text_folder)), tmp_path / name).reused
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert len(contents(tmp_path / "one")) > 4


def test_the_tokens_are_the_documents_with_an_end_after_each(text_folder: Path, tmp_path: Path) -> None:
    corpus = open_corpus(str(text_folder))
    made = prepare_small(corpus, tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    eos = made.manifest.tokenizer.eos_id
    tokens = TokenDataset.open(str(tmp_path / "out"), 8).tokens(0, made.manifest.tokens).tolist()
    texts: list[list[int]] = [[]]
    for token in tokens:
        if token == eos:
            texts.append([])
        else:
            texts[-1].append(token)
    assert [tokenizer.decode(ids) for ids in texts[:-1]] == [document.text for document in corpus.documents()]
    assert texts[-1] == []


def test_the_manifest_describes_every_file(text_folder: Path, tmp_path: Path) -> None:
    manifest = prepare_small(open_corpus(str(text_folder)), tmp_path / "out").manifest
    files = contents(tmp_path / "out")
    assert json.loads(files.pop("manifest.json"))["format_version"] == 2
    described = {shard.path: shard for shard in manifest.shards}
    assert hashlib.sha256(files.pop("tokenizer.json")).hexdigest() == manifest.tokenizer.sha256
    assert files.keys() == described.keys() | {shard.ends.path for shard in manifest.shards if shard.ends}
    for name in described:
        data = files[name]
        assert (hashlib.sha256(data).hexdigest(), len(data)) == (described[name].sha256, described[name].bytes)
    assert [shard.tokens for shard in manifest.shards[:-1]] == [3000] * (len(manifest.shards) - 1)
    assert manifest.documents == 40 == sum(shard.documents for shard in manifest.shards)
    assert manifest.tokenizer.vocab_size == 300 and manifest.dtype == "uint16"
    assert [(item.name, item.reason) for item in manifest.skipped] == [
        ("empty.txt", "empty"),
        ("latin1.txt", "not UTF-8 (byte 2)"),
    ]


def test_a_prepared_data_set_is_reused_and_others_are_kept(text_folder: Path, tmp_path: Path) -> None:
    corpus, out = open_corpus(str(text_folder)), str(tmp_path / "out")
    first = prepare_small(corpus, out)
    again = prepare_small(corpus, out)
    assert again.reused and again.manifest == first.manifest and again.digest == first.digest
    with pytest.raises(DataError, match="holds a data set made from other inputs; choose another folder or allow"):
        prepare_small(corpus, out, 301)
    (text_folder / "00.txt").write_text("changed")
    with pytest.raises(DataError, match="made from other inputs"):
        prepare_small(corpus, out)
    replaced = prepare_small(corpus, out, overwrite=True)
    assert not replaced.reused and replaced.digest != first.digest


def test_a_data_set_that_lost_a_shard_is_made_again(text_folder: Path, tmp_path: Path) -> None:
    corpus, out = open_corpus(str(text_folder)), tmp_path / "out"
    prepare_small(corpus, str(out))
    before = contents(out)
    (out / "shard-00001.arrow").unlink()
    assert not prepare_small(corpus, str(out)).reused
    assert contents(out) == before


def test_progress_ends_at_the_whole_of_each_phase(text_folder: Path, tmp_path: Path) -> None:
    seen: dict[str, tuple[int, int]] = {}
    corpus = open_corpus(str(text_folder))
    made = prepare(
        corpus, str(tmp_path / "out"), 300, progress=lambda phase, done, total: seen.update({phase: (done, total)})
    )
    size = made.manifest.inputs["corpus_bytes"]
    assert seen["tokenizer"] == seen["encode"] == (size, size)
    assert seen["read"] == (size, corpus.total_bytes())


def test_text_that_spells_the_end_token_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("before <|endoftext|> after")
    tokenizer = train_tokenizer(["before after"], 257)
    ((tokens, size),) = encode_documents(tokenizer, open_corpus(str(tmp_path / "a.txt")).documents(), "uint16")
    assert size == 26
    assert tokens.tolist().count(0) == 1 and tokens[-1] == 0
    assert tokenizer.decode(tokens[:-1].tolist()) == "before <|endoftext|> after"


def test_the_tokenizer_sample_is_spread_over_the_corpus(text_folder: Path) -> None:
    corpus = open_corpus(str(text_folder))
    texts = [document.text for document in corpus.documents()]
    total = sum(len(text.encode()) for text in texts)
    sample = list(sample_documents(corpus.documents(), total, total // 4))
    assert sample == list(sample_documents(corpus.documents(), total, total // 4))
    assert 8 <= len(sample) <= 11
    places = [texts.index(text) for text in sample]
    assert max(b - a for a, b in pairwise(places)) <= 6
    assert list(sample_documents(corpus.documents(), total, total)) == texts


def test_settings_and_corpora_that_make_no_data_set(text_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="vocab_size=256 is too small; byte-level BPE needs at least 257"):
        prepare(open_corpus(str(text_folder)), str(tmp_path / "out"), 256)
    (tmp_path / "empty").write_text("")
    with pytest.raises(DataError, match="corpus empty has no text: 1 of 1 files are empty or not UTF-8"):
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
    assert prepare_small(corpus, uri, storage=storage).reused


def given_tokenizer(folder: Path, text_folder: Path, eos: object) -> Path:
    """A Hugging Face folder with a tokenizer that has two special tokens; the second one ends a text."""
    texts = (document.text for document in open_corpus(str(text_folder)).documents())
    tokenizer = train_tokenizer(texts, 290)
    tokenizer.add_special_tokens(["<|pad|>", "<|end|>"])
    tokenizer.enable_truncation(5)
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    (folder / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    return folder


def test_a_given_tokenizer_is_used_as_it_is(text_folder: Path, tmp_path: Path) -> None:
    corpus = open_corpus(str(text_folder))
    folder = given_tokenizer(tmp_path / "model", text_folder, [291, 290])
    given = read_tokenizer(Store.open(str(folder)))
    made = prepare(corpus, str(tmp_path / "out"), 300, given=given)
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    entry = made.manifest.tokenizer
    assert (entry.eos_id, entry.eos_token, entry.vocab_size) == (291, "<|end|>", 292)
    tokens = TokenDataset.open(str(tmp_path / "out"), 8).tokens(0, made.manifest.tokens).tolist()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    first = next(corpus.documents())
    ids = tokens[: tokens.index(291)]
    assert tokenizer.decode(ids) == first.text
    assert prepare(corpus, str(tmp_path / "out"), 300, given=given).reused
    with pytest.raises(DataError, match="holds a data set made from other inputs"):
        prepare(corpus, str(tmp_path / "out"), 300)


@pytest.mark.parametrize(("eos", "message"), [(None, "has eos_token_id=None"), (999, "has no entry 999")])
def test_a_given_tokenizer_needs_an_end_of_text(eos: object, message: str, text_folder: Path, tmp_path: Path) -> None:
    folder = Store.open(str(given_tokenizer(tmp_path / "model", text_folder, eos)))
    with pytest.raises(DataError, match=message):
        prepare(open_corpus(str(text_folder)), str(tmp_path / "out"), 300, given=read_tokenizer(folder))
    with pytest.raises(DataError, match="a tokenizer is a folder with"):
        read_tokenizer(Store.open(str(tmp_path / "nowhere")))
