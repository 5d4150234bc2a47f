"""The page of ``elastic-train simulate --html``: one file, with its picture inside."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Sequence
from pathlib import Path

from elastic_train.cli.simulate_best import Search
from elastic_train.cli.simulate_figures import cause_columns, cause_rows, draw, figure_rows, number
from elastic_train.cli.simulate_question import Question
from elastic_train.planner.simulation.answer import Answer

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #22303c; max-width: 70em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums }
th, td { padding: .2em .9em .2em 0; text-align: right; white-space: nowrap }
th.text, td.text { text-align: left } tr + tr { border-top: 1px solid #e4e8ec }
.wide { overflow-x: auto } img { width: 100%; min-width: 800px }
</style></head><body>
<h1>What failures cost</h1>
<p>{{ title }}</p>
{% if sentence %}<p>{{ sentence }}</p>{% endif %}
<div class="wide"><img alt="Time by cause" src="data:image/png;base64,{{ picture }}"></div>
{% for heading, columns, text, rows in tables %}
<h2>{{ heading }}</h2>
<div class="wide"><table>
<tr>
{% for column in columns %}<th{% if loop.index0 in text %} class="text"{% endif %}>{{ column }}</th>{% endfor %}
</tr>
{% for row in rows %}
<tr>{% for cell in row %}<td{% if loop.index0 in text %} class="text"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% endfor %}
{% for note in notes %}<p>{{ note }}</p>{% endfor %}
<p>+-: half of the 95 % confidence interval of the mean over the runs; p5, p95: of single runs.</p>
</body></html>
"""


def write_page(out: Path, question: Question, answers: Sequence[Answer], search: Search | None) -> None:
    """Write the page to ``out``."""
    from jinja2 import Environment

    with tempfile.TemporaryDirectory() as folder:
        picture = draw(question, answers, search, Path(folder) / "simulation.png", title="").read_bytes()
    figures = ("Figures", ["recovery", "figure", "mean", "+-", "p5", "p95"], (0, 1), _cells(figure_rows(answers)))
    names = ["cause", *(f"{name} %" for name in cause_columns(question, answers))]
    causes = ("Where the hosts' time goes", names, (0,), _cells(cause_rows(question, answers)))
    page = Environment(autoescape=True).from_string(_PAGE)
    text = page.render(
        title=question.title,
        sentence=search.sentence if search else "",
        picture=base64.b64encode(picture).decode(),
        tables=[figures, causes],
        notes=question.notes,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")


def _cells(rows: Sequence[Sequence[object]]) -> list[list[str]]:
    return [[number(cell) if isinstance(cell, int | float) else str(cell or "") for cell in row] for row in rows]
