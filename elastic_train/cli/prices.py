"""What an accelerator costs per hour: a number, or a YAML file of the user's with one for each kind."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from elastic_train.cli.guard import UserError


@dataclass(frozen=True, slots=True)
class Price:
    """Of one accelerator for one hour."""

    per_hour: float
    currency: str = ""


def price_of(text: str, accelerator: str) -> Price:
    """``2.5``, or a file such as ``{currency: EUR, per_hour: {h100-80gb: 2.5}}``. Raises UserError."""
    try:
        value = float(text)
    except ValueError:
        return _from_file(text, accelerator)
    if not 0 <= value < math.inf:
        raise UserError(f"--price {text}: must be 0 or more, per accelerator and hour")
    return Price(value)


def _from_file(path: str, accelerator: str) -> Price:
    from elastic_train.config.yaml_text import YamlError, parse_yaml

    try:
        table = parse_yaml(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError):
        raise UserError(
            f"--price {path}: must be a number per accelerator and hour, or a YAML file that can be read"
        ) from None
    except YamlError as error:
        raise UserError(f"--price {error}") from None
    prices = table.get("per_hour") if isinstance(table, dict) else None
    if not isinstance(prices, dict):
        raise UserError(f"--price {path}: must hold {{currency: EUR, per_hour: {{{accelerator}: 2.5}}}}")
    value = prices.get(accelerator)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise UserError(
            f"--price {path}: per_hour.{accelerator}={value} must be a number of 0 or more; "
            f"there are prices of {', '.join(map(str, prices)) or 'nothing'}"
        )
    return Price(float(value), str(table.get("currency", "")))
