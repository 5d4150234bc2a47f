"""Tokenizers that were made elsewhere: a file, a Hugging Face folder, or a prepared data set's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from elastic_train.data.chat import tokenizer_settings
from elastic_train.data.errors import DataError
from elastic_train.data.manifest import MANIFEST, read_manifest
from elastic_train.data.tokenizer import GivenTokenizer, load_tokenizer
from elastic_train.storage.errors import NotFound
from elastic_train.storage.store import Store

if TYPE_CHECKING:
    from elastic_train.config.operation import StorageConfig

TOKENIZER = "tokenizer.json"
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
"""Names under which tokenizers have an end of text; a file says nothing about which of its entries is the one."""


def open_tokenizer(uri: str, storage: StorageConfig | None = None, eos_token: str | None = None) -> GivenTokenizer:
    """The tokenizer at ``uri``; ``eos_token`` says which of its entries ends a document, if it does not say so itself.

    Raises :class:`DataError` when there is none, or no such entry.
    """
    if not uri.endswith(".json"):
        return given_tokenizer(Store.open(uri, storage), eos_token)
    store, name = Store.open(folder_of(uri), storage), uri.rpartition("/")[2]
    return _with_end(store.read(name), f"{store.uri}/{name}", [eos_token] if eos_token else list(ENDS))


def folder_of(uri: str) -> str:
    """The folder that a tokenizer's settings are in: that of a ``tokenizer.json``, or ``uri`` itself."""
    folder, slash, _ = uri.rpartition("/")
    return (folder or slash or ".") if uri.endswith(".json") else uri


def given_tokenizer(folder: Store, eos_token: str | None = None) -> GivenTokenizer:
    """That of a prepared data set, or of a Hugging Face model folder. Raises DataError when there is none."""
    if not folder.exists(MANIFEST):
        return read_tokenizer(folder, eos_token)
    manifest, _ = read_manifest(folder)
    if eos_token is not None:
        raise DataError(
            f"--eos-token={eos_token} is not for {folder.uri}, a prepared data set: its documents end with "
            f"{manifest.tokenizer.eos_token}; leave it out"
        )
    given = GivenTokenizer(folder.read(manifest.tokenizer.path), manifest.tokenizer.eos_id)
    if given.sha256 != manifest.tokenizer.sha256:
        raise DataError(f"{folder.uri}/{manifest.tokenizer.path} has not the sha256 of its manifest")
    return given


def read_tokenizer(folder: Store, eos_token: str | None = None) -> GivenTokenizer:
    """The tokenizer of a Hugging Face folder; ``config.json`` says which id ends a text (the first, of several), else
    ``tokenizer_config.json``.

    Raises DataError when there is none, or no such id.
    """
    try:
        text = folder.read(TOKENIZER)
    except NotFound as error:
        raise DataError(f"{error}; a tokenizer is a {TOKENIZER}, a folder with one, or a prepared data set") from None
    if eos_token is not None:
        return _with_end(text, f"{folder.uri}/{TOKENIZER}", [eos_token])
    eos = _config(folder).get("eos_token_id")
    eos = eos[0] if isinstance(eos, list) and eos else eos
    if isinstance(eos, int):
        return GivenTokenizer(text, eos)
    named = tokenizer_settings(folder).get("eos_token")
    named = named.get("content") if isinstance(named, dict) else named
    if isinstance(named, str):
        return _with_end(text, f"{folder.uri}/{TOKENIZER}", [named])
    raise DataError(
        f"config.json in {folder.uri} has eos_token_id={eos}, and tokenizer_config.json no eos_token; "
        "documents need a token that ends them: give --eos-token"
    )


def _config(folder: Store) -> dict[str, Any]:
    try:
        config = json.loads(folder.read("config.json"))
    except NotFound:
        return {}
    except ValueError as error:
        raise DataError(f"config.json in {folder.uri} is not JSON: {error}") from None
    return config if isinstance(config, dict) else {}


def _with_end(text: bytes, name: str, ends: list[str]) -> GivenTokenizer:
    """``ends``: accepted names of the token that ends a document, of which the tokenizer must have one."""
    tokenizer = load_tokenizer(text)
    there = [number for end in ends if (number := tokenizer.token_to_id(end)) is not None]
    if len(there) != 1:
        raise DataError(
            f"{name} has {'no' if not there else 'more than one'} entry of {', '.join(ends)}; documents need a token "
            "that ends them: give --eos-token"
        )
    return GivenTokenizer(text, there[0])
