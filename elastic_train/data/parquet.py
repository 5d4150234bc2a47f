"""Text columns of Parquet files."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa

from elastic_train.data.errors import DataError
from elastic_train.data.streams import open_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow.parquet

    from elastic_train.data.corpus import InputFile
    from elastic_train.storage.store import Store

ROWS = 1024
"""Decoded at a time."""


def row_groups(store: Store, file: InputFile, column: str) -> list[tuple[int, int]]:
    """(rows before it, bytes of its text before compression) of each row group.

    Raises :class:`DataError` when the file is damaged, or the column is not there or holds no text.
    """
    with _opened(store, file, column) as (parquet, index):
        groups, rows = [], 0
        for number in range(parquet.num_row_groups):
            group = parquet.metadata.row_group(number)
            groups.append((rows, int(group.column(index).total_uncompressed_size)))
            rows += group.num_rows
        return groups


def read_rows(
    store: Store, file: InputFile, column: str, group: int, before: int
) -> Iterator[tuple[int, bytes | None]]:
    """(row from 1, its text in UTF-8 or what is there instead, None for null) of a row group."""
    row = before
    with _opened(store, file, column) as (parquet, _):
        try:
            for batch in parquet.iter_batches(ROWS, row_groups=[group], columns=[column]):
                for value in batch.column(0).cast(pa.large_binary()):
                    row += 1
                    yield row, value.as_py()
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{file.uri} is damaged behind row {row}: {error}") from None


@contextmanager
def _opened(store: Store, file: InputFile, column: str) -> Iterator[tuple[pyarrow.parquet.ParquetFile, int]]:
    """The file and the number of the column among its leaves."""
    import pyarrow.parquet as pq

    try:
        parquet = pq.ParquetFile(open_file(store, file.path), pre_buffer=True)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file.uri} is damaged, or no Parquet file: {error}") from None
    with parquet:
        schema = parquet.schema_arrow
        if column not in schema.names:
            raise DataError(
                f"{file.uri} has no column {column!r}; accepted are its text columns: {_text_columns(schema)}"
            )
        if schema.names.count(column) > 1:
            raise DataError(f"{file.uri} has {schema.names.count(column)} columns {column!r}; accepted is one")
        if not _is_text(schema.field(column).type):
            raise DataError(
                f"{file.uri}: column {column!r} holds {schema.field(column).type}; accepted are its text columns: "
                f"{_text_columns(schema)}"
            )
        paths = [parquet.metadata.schema.column(number).path for number in range(parquet.metadata.num_columns)]
        yield parquet, paths.index(column)


def _text_columns(schema: pa.Schema) -> str:
    return ", ".join(field.name for field in schema if _is_text(field.type)) or "(there is none)"


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    tests = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_binary,
        pa.types.is_large_binary,
    )
    return any(test(kind) for test in tests)
