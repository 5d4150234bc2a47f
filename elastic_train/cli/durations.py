"""Durations on the command line: ``30s``, ``10m``, ``1.5h``."""

from __future__ import annotations

import math
import re

import typer

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str | float) -> float:
    """Seconds; an option's default is a number already. Raises BadParameter with what is accepted."""
    if isinstance(text, float):
        return text
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else math.nan
    if not seconds > 0:
        raise typer.BadParameter(f"{text!r} is no duration; write 30s, 10m or 1.5h")
    return seconds
