"""data inspect, verify and show, in the process of the test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from elastic_train.cli.main import app
from elastic_train.data.corpus import open_corpus
from elastic_train.data.dataset import TokenDataset
from elastic_train.data.manifest import Manifest, read_manifest
from elastic_train.data.prepare import prepare
from elastic_train.data.shards import Stretch, write_shard
from elastic_train.storage.store import Store

LINES = ["one and one is two\n", "two and two is four, grüß dich\n", "four\n"]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three documents of one line each, many times over."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    for number, line in enumerate(LINES):
        (tmp_path / "text" / f"{number}.txt").write_text(line * 3)
    prepare(open_corpus(str(tmp_path / "text")), str(tmp_path / "set"), 257)
    return tmp_path / "set"


def told(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["data", *map(str, arguments)])
    assert result.exit_code == code, result.stderr
    return result.stderr if code else result.stdout


def test_inspect_counts_samples_of_each_packing(data: Path) -> None:
    for packing, tails in (("stream", "drop"), ("documents", "keep"), ("none", "keep")):
        seen = told("inspect", data, "--sequence-length", 32, "--packing", packing)
        samples = len(TokenDataset.open(str(data), 32, packing=packing, tails=tails))  # type: ignore[arg-type]
        assert f"samples:    {samples} of 32 tokens" in seen
    assert seen.count("shard:  ") == 1 and "documents:  3" in seen and "format 3" in seen


def test_show_prints_the_documents_of_a_sample(data: Path) -> None:
    """The three documents have 57, 99 and 15 bytes, each a token, and an end."""
    seen = told("show", data, "--sample", 1, "--sequence-length", 128, "--packing", "documents")
    assert seen.splitlines()[0] == "sample 1 of 2: 2 documents, 128 places, 114 of them with a label"
    text, last = LINES[1] * 3, LINES[2] * 3
    assert f"--- document 1, 100 tokens from token 58 of the stream\n⟦{text[0]}⟧{text[1:]}<|endoftext|>\n" in seen
    assert f"--- document 2, 16 tokens from token 158 of the stream\n⟦{last[0]}⟧{last[1:]}<|endoftext|>\n" in seen
    assert seen.endswith("--- padding, 14 places\n")


def test_show_a_cut_of_the_stream(data: Path) -> None:
    seen = told("show", data, "--sample", 1, "--sequence-length", 50)
    assert seen.splitlines()[0] == "sample 1 of 3: 2 documents, 50 places, 50 of them with a label"
    assert "--- document 1, 8 tokens from token 50 of the stream\n⟦" in seen
    assert f"--- document 2, 43 tokens from token 58 of the stream\n{LINES[1][:5]}" in seen


def test_show_takes_no_token_for_the_end_of_a_document(data: Path) -> None:
    """As in conversations whose end-of-text token ends every turn: here it is a letter of the text."""
    store = Store.open(str(data))
    manifest, _ = read_manifest(store)
    letter = int(TokenDataset.open(str(data), 8).tokens(0, 1)[0])
    made = manifest.model_copy(update={"tokenizer": manifest.tokenizer.model_copy(update={"eos_id": letter})})
    store.write("manifest.json", [made.to_bytes()])
    assert told("show", data, "--sample", 1, "--sequence-length", 50).startswith("sample 1 of 3: 2 documents")


def labelled(data: Path) -> None:
    """The same tokens, of which those of the second document count in the loss."""
    store = Store.open(str(data))
    manifest, _ = read_manifest(store)
    tokens = TokenDataset.open(str(data), 8).tokens(0, manifest.tokens).astype(np.uint16)
    ends = np.flatnonzero(tokens == manifest.tokenizer.eos_id) + 1
    counts = ((np.arange(len(tokens)) >= ends[0]) & (np.arange(len(tokens)) < ends[1])).astype(np.uint8)
    whole = [Stretch(tokens, ends.tolist(), counts)]
    shard = write_shard(store, manifest.shards[0].path, whole, "uint16", manifest.batch_tokens, labelled=True)
    made: Manifest = manifest.model_copy(update={"labelled": True, "shards": (shard,)})
    store.write("manifest.json", [made.to_bytes()])


def test_show_marks_what_is_not_to_be_learned(data: Path) -> None:
    labelled(data)
    seen = told("show", data, "--sample", 0, "--sequence-length", 150)
    assert seen.splitlines()[0] == "sample 0 of 1: 2 documents, 150 places, 93 of them with a label"
    assert f"stream\n⟦{LINES[0] * 3}<|endoftext|>⟧\n" in seen
    assert f"--- document 2, 93 tokens from token 58 of the stream\n{LINES[1] * 2}" in seen
    assert "only the assistant's tokens count in the loss" in told("inspect", data)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["show", "{data}", "--sample", "99"], "--sample 99: the data set has 0 samples of 256 tokens"),
        (["show", "{data}", "--sample", "0", "--packing", "tight"], "--packing tight: must be stream or documents"),
        (["show", "{data}", "--sample", "0", "--tails", "cut"], "--tails cut: must be keep or drop"),
        (["verify", "{data}/nowhere"], "nowhere has no manifest.json"),
    ],
)  # fmt: skip
def test_mistakes(data: Path, arguments: list[str], sentence: str) -> None:
    assert sentence in told(*(argument.format(data=data) for argument in arguments), code=2)


def test_verify_accepts_what_is_whole_and_names_what_is_not(data: Path) -> None:
    assert "1 shard, " in told("verify", data)
    manifest, _ = read_manifest(Store.open(str(data)))
    (described,) = manifest.shards
    shard, tokenizer = data / described.path, data / manifest.tokenizer.path
    assert described.ends is not None
    ends = data / described.ends.path
    whole = shard.read_bytes()
    offset, size = manifest.shards[0].batches[0]

    def damaged(at: int) -> str:
        shard.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        return told("verify", data, code=1)

    assert f"damaged: shard {shard} is damaged: batch 0 (bytes {offset} to {offset + size}), xxh3 " in damaged(
        offset + 9
    )
    assert f"damaged: shard {shard} is damaged outside its batches: sha256 " in damaged(offset + size)
    shard.write_bytes(whole[:-1])
    assert f"damaged: shard {shard} has {len(whole) - 1} bytes, the manifest says {len(whole)}" in told(
        "verify", data, code=1
    )
    shard.unlink()
    tokenizer.write_text("{}")
    ends.write_bytes(b"x")
    seen = told("verify", data, code=1)
    assert [line.partition(" is ")[0] for line in seen.splitlines()] == [
        f"damaged: file {tokenizer}",
        f"damaged: shard {shard}",
        f"damaged: file {ends}",
    ]


def test_verify_reads_format_1(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).parents[1] / "data" / "format_1"
    assert "2 shards, " in told("verify", folder)
