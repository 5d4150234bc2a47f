"""Lines of ``steps.jsonl`` as the audit reads them: what each says is checked before it is believed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from elastic_train.data.errors import DataError


class StepLine(BaseModel):
    """Of a finished step: what its line says of the data; the other keys are not looked at.

    ``slots``: ranges [first, end) of the slots that were computed. ``batch``: digest of what was in them. ``samples``:
    their ids. ``skipped``: the step changed nothing. None: the line does not say it.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    step: Annotated[int, Field(ge=1)]
    slots: list[Annotated[list[int], Field(min_length=2, max_length=2)]] | None = None
    batch: str | None = None
    samples: list[int] | None = None
    skipped: bool = False


def parse_lines(lines: Iterable[dict[str, Any]]) -> list[StepLine]:
    """The lines in their order. Raises :class:`DataError` with the number of the first one that is not of a step."""
    return [_parse(number, line) for number, line in enumerate(lines, start=1)]


def _parse(number: int, line: dict[str, Any]) -> StepLine:
    try:
        return StepLine.model_validate(line)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise DataError(f"steps.jsonl, line {number}: {key}: {first['msg']}") from None
