"""Numbers on the command line: ``70e9``, ``70B``, ``1.4T``; and of things: ``1 shard``, ``2 shards``."""

from __future__ import annotations

import math
import re

from elastic_train.cli.guard import UserError

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "P": 1e15}


def parse_count(option: str, text: str) -> float:
    """More than 0. Raises UserError with what is accepted."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:[eE]\+?\d+)?)([KMBTP]?)", text.replace(",", "").replace("_", "").strip())
    value = float(match[1]) * _UNITS[match[2]] if match else math.nan
    if not 0 < value < math.inf:
        raise UserError(f"{option} {text}: must be a number above 0, such as 70e9, 70B or 1.4T")
    return value


def counted(number: int, one: str, several: str = "") -> str:
    """``1 shard``, ``2,000 shards``; ``several``: where that is not an s more."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"
