from __future__ import annotations

import gzip
import json
import re
import secrets
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_train.config.operation import StorageConfig
from elastic_train.data.corpus import open_corpus
from elastic_train.data.documents import read_slice
from elastic_train.data.errors import DataError
from elastic_train.data.parts import cut
from elastic_train.storage.store import Store
from tests.s3_server import S3Server

LINES = [{"text": f"line {i} grüßt " + "x" * (i % 7), "other": i} for i in range(50)]


def read(path: Path | str, part_bytes: int = 2**20, **how: Any) -> list[tuple[int, str | None, str]]:
    """(place, text, problem) of all documents, whatever the parts."""
    corpus = open_corpus(str(path), **how)
    return [
        (found.place, found.text, found.problem)
        for part in cut(corpus, part_bytes)
        for piece in part
        for found in read_slice(corpus, Store.open(piece.file.store, corpus.storage), piece)
    ]


def jsonl(lines: list[Any]) -> bytes:
    return b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines)


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", jsonl(LINES)),
        ("a.jsonl", jsonl(LINES)[:-1]),
        ("a.jsonl", jsonl(LINES).replace(b"\n", b"\r\n")),
        ("a.jsonl.gz", gzip.compress(jsonl(LINES))),
        ("a.jsonl.gz", gzip.compress(jsonl(LINES[:20])) + gzip.compress(jsonl(LINES[20:]))),
        ("a.jsonl.gz", gzip.compress(jsonl(LINES[:20])) + bytes(700) + gzip.compress(jsonl(LINES[20:])) + bytes(3)),
        ("a.ndjson.zst", zstd(jsonl(LINES))),
        ("a.jsonl.zst", zstd(jsonl(LINES[:20])) + zstd(jsonl(LINES[20:]))),
    ],
    ids=["plain", "no last newline", "windows", "gz", "gz in members", "gz and zeros", "zst", "zst in frames"],
)
def test_json_lines(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    assert [text for _, text, _ in read(tmp_path / name)] == [line["text"] for line in LINES]
    assert [place for place, _, _ in read(tmp_path / name)] == list(range(1, 51))


def test_any_field_of_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"content": "one", "text": 1}]))
    assert read(tmp_path / "a.jsonl", column="content") == [(1, "one", "")]


@pytest.mark.parametrize("part_bytes", [1, 2, 30, 31, 32, 33, 64, 1000])
def test_every_line_is_read_once_wherever_the_file_is_cut(tmp_path: Path, part_bytes: int) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(LINES))
    assert [text for _, text, _ in read(tmp_path / "a.jsonl", part_bytes)] == [line["text"] for line in LINES]


def test_lines_without_a_document_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n\n{"text": "gr\xfc\xdfe"}\n \n{"text": ""}\n')
    assert read(tmp_path / "a.jsonl") == [
        (1, "one", ""),
        (2, "", ""),
        (3, None, "not UTF-8 (byte 12)"),
        (4, " ", ""),
        (5, "", ""),
    ]


ACCEPTED = "accepted is one JSON object per line with a string 'text'"


@pytest.mark.parametrize(
    ("line", "column", "message"),
    [
        (b'{"text": "one"', 15, "not JSON (Expecting ',' delimiter)"),
        (b'{"text": "one}', 10, "not JSON (Unterminated string starting at)"),
        (b'{"text": "a"} {}', 15, "not JSON (Extra data)"),
        (b"\xef\xbb\xbf{}", 1, "not JSON (a byte order mark)"),
        (b"[" * 100_000, 1, "not JSON that can be read (brackets too deep)"),
        (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", 1, "not JSON that can be read (a number of too many digits)"),
        (b'  ["text"]', 3, "a list"),
        (b'"text"', 1, "a string"),
        (b'{"body": "x", "title": 3}', 1, "no field 'text', there are 'body', 'title'"),
        (b"{}", 1, "no field 'text', there are none"),
        (b'{"meta": {"text": "x"}, "text":  7}', 34, "'text' is a number"),
        (b'{"text": null}', 10, "'text' is null"),
        (b'{"text": ["a"]}', 10, "'text' is a list"),
        (b'{"a": [1, {}], "text": true, "b": "}"}', 24, "'text' is a boolean"),
    ],
)
@pytest.mark.parametrize("part_bytes", [2**20, 40])
def test_a_bad_line_is_named_with_its_column(
    tmp_path: Path, line: bytes, column: int, message: str, part_bytes: int
) -> None:
    """Also in the middle of a file that is cut, where lines are counted from the cut."""
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n\n' * 6 + line + b'\n{"text": "good"}\n')
    with pytest.raises(DataError) as error:
        read(tmp_path / "a.jsonl", part_bytes)
    start = f"{tmp_path}/a.jsonl, line 13, column {column}: {message}"
    assert str(error.value).startswith(start) and str(error.value).endswith(ACCEPTED)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.gz"])
def test_damaged_compressed_files_are_named(tmp_path: Path, name: str) -> None:
    data = jsonl([{"text": str(i * 7919)} for i in range(3000)])
    whole = gzip.compress(data) if name.endswith("gz") else zstd(data)
    (tmp_path / name).write_bytes(whole)
    assert len(read(tmp_path / name)) == (3000 if "jsonl" in name else 1)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    spoilt = [whole[: len(whole) // 2], whole[:-2], b"no such thing"]
    if name.endswith("gz"):
        spoilt.append(bytes(flipped))  # pyarrow writes zstd without a checksum
        spoilt += [whole + b"rest", whole + bytes(9) + b"rest", whole + bytes(9) + whole[:20]]
    for damaged in spoilt:
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(
            DataError, match=rf"{tmp_path}/{name}(, line \d+, column \d+: not JSON| is damaged, or no )"
        ):
            read(tmp_path / name)


def test_text_files_are_documents_also_compressed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("line\r\nGrüße\n".encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("Grüße\n".encode()))
    (tmp_path / "c.txt").write_bytes(b"gr\xfc\xdfe")
    assert read(tmp_path) == [(0, "line\r\nGrüße\n", ""), (0, "Grüße\n", ""), (0, None, "not UTF-8 (byte 2)")]


def test_a_byte_order_mark_is_no_text_where_a_file_begins(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    (tmp_path / "a.txt").write_bytes(mark + b"one" + mark + b"two")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(mark + b"three"))
    (tmp_path / "c.txt").write_bytes(mark)
    for name, pack in (("d.jsonl", bytes), ("e.jsonl.zst", zstd)):
        (tmp_path / name).write_bytes(pack(mark + jsonl([{"text": "four"}, {"text": "\ufefffive"}])))
    texts = ["one\ufefftwo", "three", "", "four", "\ufefffive", "four", "\ufefffive"]
    for part_bytes in (2**20, 10):
        assert [text for _, text, _ in read(tmp_path, part_bytes)] == texts


TEXTS = [f"row {i} grüßt" for i in range(25)]


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.large_binary(),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
    ids=str,
)
@pytest.mark.parametrize("part_bytes", [2**20, 1])
def test_parquet(tmp_path: Path, kind: pa.DataType, part_bytes: int) -> None:
    column = pa.array(TEXTS).cast(kind) if not pa.types.is_dictionary(kind) else pa.array(TEXTS).dictionary_encode()
    table = pa.table({"number": list(range(25)), "body": column, "nested": [{"text": "x"}] * 25})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    assert read(tmp_path / "a.parquet", part_bytes, column="body") == [
        (row, text, "") for row, text in enumerate(TEXTS, start=1)
    ]


def test_rows_without_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([b"one", None, b"\xff", b""], pa.binary())}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [(1, "one", ""), (2, "", ""), (3, None, "not UTF-8 (byte 0)"), (4, "", "")]


def test_parquet_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"number": [1, 2], "body": ["a", "b"], "title": ["c", "d"]}), file)
    with pytest.raises(DataError, match=r"a.parquet has no column 'text'; accepted are its text columns: body, title$"):
        read(file)
    with pytest.raises(DataError, match=r"a.parquet: column 'number' holds int64; accepted are its text columns: body"):
        read(file, column="number")
    twice = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(twice, file)
    with pytest.raises(DataError, match=r"a.parquet has 2 columns 'text'; accepted is one"):
        read(file)
    pq.write_table(pa.table({"body": ["a"]}), file)
    for damaged in (b"PAR1 but no more", file.read_bytes()[:-1], b""):
        file.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"{re.escape(str(file))} is damaged, or no Parquet file: "):
            read(file, column="body")


def test_a_damaged_page_of_parquet_is_named_with_the_rows_before_it(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": TEXTS}), file, row_group_size=10, compression="zstd", use_dictionary=False)
    data = bytearray(file.read_bytes())
    place = pq.ParquetFile(file).metadata.row_group(1).column(0).data_page_offset
    data[place + 40 : place + 60] = bytes(20)
    file.write_bytes(data)
    with pytest.raises(DataError, match=rf"{re.escape(str(file))} is damaged behind row 10: "):
        read(file)


@pytest.mark.slow
@pytest.mark.parametrize("part_bytes", [2**20, 500])
def test_object_storage_gives_what_a_folder_gives(
    tmp_path: Path, s3_environment: S3Server, s3_bucket: str, part_bytes: int
) -> None:
    storage = StorageConfig(endpoint_url=s3_environment.endpoint_url)
    uri = f"s3://{s3_bucket}/{secrets.token_hex(4)}"
    files = {"a.jsonl": jsonl(LINES), "b.jsonl.gz": gzip.compress(jsonl(LINES)), "c.jsonl.zst": zstd(jsonl(LINES))}
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "d.parquet", row_group_size=10)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    for file in tmp_path.iterdir():
        Store.open(uri, storage).write(file.name, [file.read_bytes()])
    found = read(uri, part_bytes, storage=storage)
    assert found == read(tmp_path, part_bytes) and len(found) == 175
