from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from elastic_train.data.corpus import open_corpus
from elastic_train.data.errors import DataError
from elastic_train.data.given import folder_of, open_tokenizer
from elastic_train.data.prepare import prepare
from elastic_train.data.tokenizer import parse_tokenizer
from elastic_train.storage.errors import NotFound


def folder(path: Path, tokens: list[str], **files: object) -> Path:
    """A folder with a tokenizer of these special tokens and JSON files of these contents."""
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.add_special_tokens(tokens)
    path.mkdir()
    (path / "tokenizer.json").write_text(tokenizer.to_str())
    for name, content in files.items():
        (path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("files", "eos_token", "expected"),
    [
        ({"config": {"eos_token_id": 2}}, None, 2),
        ({"config": {"eos_token_id": [2, 1]}}, None, 2),
        ({"config": {}, "tokenizer_config": {"eos_token": "<|im_end|>"}}, None, 2),
        ({"tokenizer_config": {"eos_token": {"content": "</s>"}}}, None, 1),
        ({"config": {"eos_token_id": 2}}, "</s>", 1),
    ],
)
def test_a_folder_says_what_ends_a_text(
    tmp_path: Path, files: dict[str, object], eos_token: str | None, expected: int
) -> None:
    path = folder(tmp_path / "hf", ["</s>", "<|im_end|>"], **files)
    assert open_tokenizer(str(path), eos_token=eos_token).eos_id == expected


def test_a_file_says_it_when_only_one_of_its_entries_can_be_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = folder(tmp_path / "one", ["<pad>", "</s>"])
    assert open_tokenizer(str(one / "tokenizer.json")).eos_id == 2
    monkeypatch.chdir(one)
    assert open_tokenizer("tokenizer.json").eos_id == 2
    two = str(folder(tmp_path / "two", ["</s>", "<|im_end|>"]) / "tokenizer.json")
    with pytest.raises(DataError, match=r"two/tokenizer\.json has more than one entry of .*: give --eos-token"):
        open_tokenizer(two)
    assert open_tokenizer(two, eos_token="<|im_end|>").eos_id == 2
    with pytest.raises(DataError, match=r"two/tokenizer\.json has no entry of <eos>; documents need a token that ends"):
        open_tokenizer(two, eos_token="<eos>")


def test_where_a_tokenizer_lies() -> None:
    for uri, place in (
        ("a/tokenizer.json", "a"),
        ("tokenizer.json", "."),
        ("/tokenizer.json", "/"),
        ("/a", "/a"),
        ("s3://b/x/y.json", "s3://b/x"),
    ):
        assert folder_of(uri) == place
    with pytest.raises(NotFound, match=r"^/no-such\.json"):
        open_tokenizer("/no-such.json")


def test_a_prepared_data_set_says_itself_what_ends_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    prepare(open_corpus(str(tmp_path / "a.txt")), str(tmp_path / "out"), 300)
    assert open_tokenizer(str(tmp_path / "out")).eos_id == 0
    with pytest.raises(DataError, match=r"--eos-token=</s> is not for .*/out, a prepared data set: .*<\|endoftext\|>;"):
        open_tokenizer(str(tmp_path / "out"), eos_token="</s>")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has eos_token_id=None, and tokenizer_config.json no eos_token; .* give --eos-token"),
        ({"config": "{"}, r"config\.json in .* is not JSON"),
        ({"tokenizer_config": "[]"}, r"tokenizer_config\.json in .* is not a JSON object"),
        ({"tokenizer_config": {"eos_token": "<eos>"}}, "has no entry of <eos>"),
        ({"config": {"eos_token_id": 1}, "tokenizer": "{}"}, r"tokenizer\.json cannot be read: "),
    ],
)
def test_folders_without_a_usable_tokenizer(tmp_path: Path, files: dict[str, object], message: str) -> None:
    path = folder(tmp_path / "hf", ["</s>"], **files)
    with pytest.raises(DataError, match=message):
        parse_tokenizer(open_tokenizer(str(path)))
