"""Sizes of memory and disk as people write them: 80GiB, 512MB."""

from __future__ import annotations

import re

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})")


def parse_size(text: str) -> int:
    """Bytes. Raises ValueError for anything that is no size."""
    size = _SIZE.fullmatch(text)
    if size is None:
        raise ValueError(f"must be a size such as 80GiB or 512MB (units: {', '.join(_UNITS)})")
    return int(float(size[1]) * _UNITS[size[2]])


def gib(size: float) -> str:
    """``74.51 GiB``"""
    return f"{size / 2**30:,.2f} GiB"
