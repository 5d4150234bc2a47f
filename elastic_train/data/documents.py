"""Documents of a slice: files of text, lines of JSON, rows of Parquet, conversations."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elastic_train.data.chat import ConversationError, Rendered
from elastic_train.data.errors import DataError
from elastic_train.data.parquet import read_rows
from elastic_train.data.streams import decompressed, lines, ranged
from elastic_train.storage.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elastic_train.data.corpus import Corpus
    from elastic_train.data.parts import Slice
    from elastic_train.storage.store import Store

SPACE = " \t\r\n"
"""What JSON takes for white space."""


@dataclass(frozen=True, slots=True)
class Found:
    """A document, or what is there instead.

    ``place``: its line or row, from 1; of a line in the slice of a file it is counted from the slice's first; 0: the
    file is the document. ``problem``: why ``text`` is None. ``spans``: of a conversation, as of
    :class:`~elastic_train.data.chat.Rendered`.
    """

    place: int
    text: str | None
    problem: str = ""
    spans: tuple[tuple[int, int], ...] = ()


def read_slice(corpus: Corpus, store: Store, piece: Slice) -> Iterator[Found]:
    """The documents of a slice in order; ``store`` has its file.

    Raises :class:`DataError` for input that is malformed, with its place.
    """
    if piece.file.format == "text":
        yield _decoded(0, b"".join(_blocks(store, piece)))
    elif piece.file.format == "parquet":
        for row, value in read_rows(store, piece.file, corpus.column, piece.begin, piece.rows):
            yield _decoded(row, value or b"")
    else:
        yield from _json_lines(corpus, store, piece)


def _blocks(store: Store, piece: Slice) -> Iterator[bytes]:
    if piece.file.compression is not None:
        return decompressed(store, piece.file)
    return iter([_checked(store, piece)])


def _checked(store: Store, piece: Slice) -> bytes:
    """A whole file, as it was when it was listed."""
    data = store.read(piece.file.path)
    if len(data) != piece.file.size:
        raise DataError(f"{piece.file.uri} has changed while it was read: {piece.file.size} bytes, then {len(data)}")
    return data


def _numbered(store: Store, piece: Slice) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of the lines that begin in the slice."""
    if piece.file.compression is not None:
        yield from enumerate(lines(decompressed(store, piece.file)), start=1)
        return
    begin = max(piece.begin - 1, 0)  # with the byte before: the slice may begin with a line
    number, place = 0, begin
    for line in lines(ranged(store, piece.file.path, piece.file.size, begin, piece.end)):
        if place >= piece.end:
            return
        if place >= piece.begin:
            number += 1
            yield number, line
        place += len(line) + 1


def _decoded(place: int, data: bytes) -> Found:
    try:
        return Found(place, data.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Found(place, None, f"not UTF-8 (byte {error.start})")


def _json_lines(corpus: Corpus, store: Store, piece: Slice) -> Iterator[Found]:
    for number, line in _numbered(store, piece):
        decoded = _decoded(number, line)
        if decoded.text is None or not decoded.text.strip(SPACE):
            yield decoded
        else:
            try:
                yield _document(corpus, piece, number, decoded.text)
            except _BadLine as error:
                where = f"{piece.file.uri}, line {_line(store, piece, number)}, column {error.column}"
                raise DataError(f"{where}: {error}") from None


class _BadLine(Exception):
    def __init__(self, column: int, message: str) -> None:
        super().__init__(message)
        self.column = column


def _document(corpus: Corpus, piece: Slice, number: int, line: str) -> Found:
    field = "messages" if piece.file.format == "chat" else corpus.column
    accepted = f"accepted is one JSON object per line with {'a list' if field == 'messages' else 'a string'} {field!r}"
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise _BadLine(error.colno, f"not JSON ({error.msg}); {accepted}") from None
    except (ValueError, RecursionError) as error:  # numbers of 10,000 digits, brackets 10,000 deep
        raise _BadLine(1, f"not JSON ({error}); {accepted}") from None
    if not isinstance(value, dict):
        raise _BadLine(_indent(line), f"{_kind(value)}; {accepted}")
    if field not in value:
        named = ", ".join(repr(name) for name in list(value)[:8]) or "none"
        raise _BadLine(_indent(line), f"no field {field!r}, there are {named}; {accepted}")
    if piece.file.format == "chat":
        rendered = _rendered(corpus, value[field], line)
        return Found(number, rendered.text, spans=rendered.spans)
    if not isinstance(value[field], str):
        raise _BadLine(_column(line, field), f"{field!r} is {_kind(value[field])}; {accepted}")
    return Found(number, value[field])


def _rendered(corpus: Corpus, messages: Any, line: str) -> Rendered:
    if corpus.chat is None:
        raise DataError("conversations need a chat template; give --chat-template or a --tokenizer folder that has one")
    try:
        return corpus.chat.render(messages)
    except ConversationError as error:
        raise _BadLine(_column(line, "messages"), str(error)) from None


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(SPACE)) + 1


def _column(line: str, field: str) -> int:
    """The column, from 1, of the value of a field of the object that ``line`` is."""
    decoder, place, found = json.JSONDecoder(), line.index("{") + 1, 1
    while True:
        place = _skip(line, place)
        if line[place] == "}":
            return found
        name, place = decoder.raw_decode(line, place)
        place = _skip(line, _skip(line, place) + 1)
        if name == field:
            found = place + 1  # of several the last counts
        _, place = decoder.raw_decode(line, place)
        place = _skip(line, place)
        place += line[place] == ","


def _skip(line: str, place: int) -> int:
    while line[place] in SPACE:
        place += 1
    return place


def _line(store: Store, piece: Slice, number: int) -> int:
    """The number in the file of a line that is counted from the slice's first."""
    if piece.file.compression is not None or piece.begin == 0:
        return number
    try:
        before = ranged(store, piece.file.path, piece.begin, 0, piece.begin)
        newlines, last = 0, b""
        for block in before:
            newlines, last = newlines + block.count(b"\n"), block[-1:]
    except StorageError:
        return number
    return newlines + (last != b"\n") + number
