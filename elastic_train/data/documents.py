"""Documents of a slice: files of text, lines of JSON, rows of Parquet, conversations."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

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
BYTE_ORDER_MARK = "\ufeff"
DOCUMENT_BYTES = 2**27
"""Of a file of text, or of a line. Longer ones are left out: one alone would take gigabytes of memory to encode."""


@dataclass(frozen=True, slots=True)
class Found:
    """A document, or what is there instead.

    ``place``: its line or row, from 1; of a line in the slice of a file it is counted from the slice's first; 0: the
    file is the document. ``problem``: why ``text`` is None, in words and as ``kind``. ``spans``: of a conversation, as
    of :class:`~elastic_train.data.chat.Rendered`.
    """

    place: int
    text: str | None
    problem: str = ""
    spans: tuple[tuple[int, int], ...] = ()
    kind: Literal["not_utf8", "too_long"] = "not_utf8"


def read_slice(corpus: Corpus, store: Store, piece: Slice, max_characters: int | None = None) -> Iterator[Found]:
    """The documents of a slice in order; ``store`` has its file.

    What is longer than :data:`DOCUMENT_BYTES`, or for sure than ``max_characters``, is not read into memory. Raises
    :class:`DataError` for input that is malformed, with its place.
    """
    if piece.file.format == "text":
        yield _file(store, piece, max_characters)
    elif piece.file.format == "parquet":
        for row, value in read_rows(store, piece.file, corpus.column, piece.begin, piece.rows):
            yield _decoded(row, value or b"")
    else:
        yield from _json_lines(corpus, store, piece)


def _file(store: Store, piece: Slice, max_characters: int | None) -> Found:
    limit, reason = DOCUMENT_BYTES, f"longer than {DOCUMENT_BYTES} bytes"
    if max_characters is not None and 4 * max_characters < limit:  # a character has four bytes at most
        limit, reason = 4 * max_characters, f"longer than {max_characters} characters"
    too_long = Found(0, None, reason, kind="too_long")
    if piece.file.compression is None:
        return too_long if piece.file.size > limit else _decoded(0, _checked(store, piece), begins=True)
    data = bytearray()
    for block in decompressed(store, piece.file):
        data += block
        if len(data) > limit:
            return too_long
    return _decoded(0, data, begins=True)


def _checked(store: Store, piece: Slice) -> bytes:
    """A whole file, as it was when it was listed."""
    data = store.read(piece.file.path)
    if len(data) != piece.file.size:
        raise DataError(f"{piece.file.uri} has changed while it was read: {piece.file.size} bytes, then {len(data)}")
    return data


def _lines(store: Store, piece: Slice) -> Iterator[bytes | None]:
    """The lines that begin in the slice, None for those that are too long."""
    if piece.file.compression is not None:
        return lines(decompressed(store, piece.file), DOCUMENT_BYTES)
    first = max(piece.begin - 1, 0)  # with the byte before: the slice may begin with a line
    blocks = ranged(store, piece.file.path, piece.file.size, first, piece.end)
    return lines(blocks, DOCUMENT_BYTES, piece.begin - first, piece.end - first)


def _decoded(place: int, data: bytes | bytearray, *, begins: bool = False) -> Found:
    """``begins``: it is the first of its file, where a byte order mark says nothing but that it is UTF-8."""
    try:
        text = data.decode("utf-8")
        return Found(place, text.removeprefix(BYTE_ORDER_MARK) if begins else text)
    except UnicodeDecodeError as error:
        return Found(place, None, f"not UTF-8 (byte {error.start})")


def _json_lines(corpus: Corpus, store: Store, piece: Slice) -> Iterator[Found]:
    for number, line in enumerate(_lines(store, piece), start=1):
        if line is None:
            yield Found(number, None, f"longer than {DOCUMENT_BYTES} bytes", kind="too_long")
            continue
        decoded = _decoded(number, line, begins=piece.begin == 0 and number == 1)
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
        found = "a byte order mark" if line.startswith(BYTE_ORDER_MARK) else error.msg
        raise _BadLine(error.colno, f"not JSON ({found}); {accepted}") from None
    except RecursionError:
        raise _BadLine(1, f"not JSON that can be read (brackets too deep); {accepted}") from None
    except ValueError:
        raise _BadLine(1, f"not JSON that can be read (a number of too many digits); {accepted}") from None
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
