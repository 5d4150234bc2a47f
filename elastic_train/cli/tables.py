"""Tables: for people on a terminal, and lines with tabs, exact values and a header for everything else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import typer


@dataclass(frozen=True, slots=True)
class Column:
    """``human`` writes a value for people; elsewhere it is written as it is."""

    name: str
    human: Callable[[Any], str] = str
    left: bool = False


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[Any]]) -> None:
    """None is an empty cell."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        typer.echo("\t".join(column.name for column in columns))
        for row in rows:
            typer.echo("\t".join("" if value is None else " ".join(str(value).split()) for value in row))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            column.name, justify="left" if column.left else "right", overflow="fold", no_wrap=not column.left
        )
    for row in rows:
        cells = ("" if v is None else column.human(v) for column, v in zip(columns, row, strict=True))
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)


def is_narrow(width: int) -> bool:
    """Whether a table for people has fewer than ``width`` characters."""
    from rich.console import Console

    console = Console()
    return console.is_terminal and console.width < width


def count(value: int) -> str:
    """``1,234``"""
    return f"{value:,}"


def size(nbytes: int) -> str:
    """``1.2 GB``"""
    from rich.filesize import decimal

    return decimal(nbytes).replace("bytes", "B")


def age(seconds: float) -> str:
    """``5 m``: the largest unit alone."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def moment(seconds: float) -> str:
    """``2026-11-29 17:16:27 UTC``, of seconds since the epoch"""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def number(value: float) -> str:
    """``2.314``, ``1.2e-07``"""
    return f"{value:.4g}"


def layout_name(sizes: dict[str, int]) -> str:
    """``pp2 x dp_shard2``; axes that are not known here are written as well."""
    return " x ".join(f"{axis}{length}" for axis, length in sizes.items() if length > 1) or "single"
