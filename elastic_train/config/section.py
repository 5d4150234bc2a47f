"""What all sections of a job file have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Problems(ValueError):
    """Several things wrong at once, each a sentence that names its field."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are never changed after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
