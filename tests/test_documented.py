"""Figures that commands compute are those that the pages show."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import documented
from benchmarks.documented import TABLES, Table, brought_up_to_date


@pytest.mark.parametrize("name", [name for name, table in TABLES.items() if table.quick])
def test_a_table_is_what_the_commands_say(name: str) -> None:
    page, wanted = brought_up_to_date(TABLES[name])
    assert page == wanted, f"docs/{TABLES[name].page}: {name}; python -m benchmarks.documented --write"


def test_only_the_table_itself_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "# Page\n\n| a | b |\n|---|---|\n| x | 1 |\n| y | 2 |\n\n| after | it |\n"
    (tmp_path / "page.md").write_text(page)
    monkeypatch.setattr(documented, "DOCS", tmp_path)
    table = Table("page.md", lambda: ["| a | b |", "|---|---|", "| z | 3 |"])
    assert brought_up_to_date(table) == (page, "# Page\n\n| a | b |\n|---|---|\n| z | 3 |\n\n| after | it |\n")
    with pytest.raises(ValueError, match="must be there once"):
        brought_up_to_date(Table("page.md", lambda: ["| c | d |"]))
