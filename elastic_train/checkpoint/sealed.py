"""Small JSON records that carry their own xxh3: what decides which bytes are believed must not be wrong by a bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import xxhash

from elastic_train.checkpoint.errors import CheckpointError
from elastic_train.storage.formats import KEY

REREADS = 3
"""What is wrong is read again this often before it counts as damaged: it may have been spoilt on the way."""

Record = TypeVar("Record")


def seal(name: str, body: bytes) -> bytes:
    """``{"name":body,"xxh3":"..."}`` for a JSON ``body``."""
    return _opening(name) + body + _closing(body)


def unseal(name: str, text: bytes) -> bytes:
    """The body of what :func:`seal` made; raises CheckpointError unless every bit of it is as it was."""
    body = text[len(_opening(name)) : -len(_closing(b""))]
    if text != seal(name, body):
        raise CheckpointError(f"not a whole {name}: its {len(text)} bytes do not have the checksum at their end")
    return body


def version_of(name: str, text: bytes) -> object:
    """The ``format_version`` of what :func:`seal` made. Raises CheckpointError when it is not whole, or no object."""
    try:
        return json.loads(unseal(name, text))[KEY]
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"not a {name}: it does not say its format") from error


def reread(read: Callable[[], Record]) -> Record:
    """``read()``, again while it raises CheckpointError."""
    for _ in range(REREADS):
        with suppress(CheckpointError):
            return read()
    return read()


def _opening(name: str) -> bytes:
    return b'{"' + name.encode() + b'":'


def _closing(body: bytes) -> bytes:
    return b',"xxh3":"' + xxhash.xxh3_64_hexdigest(body).encode() + b'"}'
