from __future__ import annotations

from pathlib import Path

from elastic_train.config.reference import reference
from elastic_train.config.schema import leaf_paths

PAGE = Path(__file__).resolve().parents[2] / "docs" / "jobs.md"


def test_page_is_what_the_models_say() -> None:
    made = reference()
    assert PAGE.read_text() == made, "run: python -m elastic_train.config.reference > docs/jobs.md"


def test_every_field_is_described() -> None:
    rows = [line for line in reference().splitlines() if line.startswith("| `")]
    assert {row.split("`")[1] for row in rows} >= set(leaf_paths())
    assert not [row for row in rows if row.endswith("|  |")]
