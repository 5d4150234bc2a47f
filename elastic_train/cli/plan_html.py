"""``elastic-train plan --html``: one file with the tables and the plots in it; it loads nothing and runs no script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from elastic_train.cli.plan_answer import Answer, Priced

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #22303c; max-width: 1240px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid #d5dbe1 }
p, li { margin: .25em 0 } .faint { color: #5b6975 } .wide { overflow-x: auto }
svg { width: 100%; max-width: 1056px; min-width: 700px; height: auto }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; margin: .8em 0 }
th, td { padding: .3em .6em; text-align: right; border-bottom: 1px solid #e6eaee; vertical-align: top }
th, td { max-width: 22em } th { color: #5b6975; font-weight: 600 }
.text { text-align: left; min-width: 11em; max-width: 46em }
tr.chosen { background: #eef4fa }
"""


def page(answer: Answer, shown: int) -> str:
    """The report; ``shown``: number of the layout whose memory and pipeline are drawn."""
    row = answer.priced[shown - 1]
    title = f"{answer.question.job.name} on {answer.question.gpus:,} x {answer.question.accelerator.name}"
    body = "\n".join(_sections(answer, row, shown))
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{STYLE}</style></head>\n'
        f"<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _sections(answer: Answer, row: Priced, shown: int) -> Iterator[str]:
    from elastic_train.cli.plan_pictures import memory_figure, pipeline_figure, time_figure
    from elastic_train.cli.plan_tables import host_lines, question_lines, rejected_lines, state_lines, why_lines

    yield _paragraphs(question_lines(answer))
    yield "<h2>Layouts, fastest first</h2>"
    yield _layouts(answer, shown)
    yield _list(why_lines(answer))
    yield _picture(time_figure(answer.priced))
    yield "<h2>What was ruled out</h2>"
    yield _list(rejected_lines(answer)) or "<p>Nothing.</p>"
    yield f"<h2>Memory of #{shown}, {escape(str(row.candidate.layout))}</h2>"
    yield _picture(memory_figure(row))
    yield _memory(row)
    yield _list(line for lines in (state_lines(row), host_lines(row)) for line in lines)
    if row.candidate.layout.pp > 1:
        yield f"<h2>Pipeline of #{shown}</h2>"
        yield _picture(pipeline_figure(row))
    yield "<h2>The accelerator's numbers</h2>"
    yield _accelerator(answer)


def _picture(figure: Figure) -> str:
    """On a narrow screen it is moved sideways, as tables are: shrunk, its words could not be read."""
    from elastic_train.cli.plan_pictures import as_svg

    return f'<div class="wide">{as_svg(figure)}</div>'


def _layouts(answer: Answer, shown: int) -> str:
    from elastic_train.cli.plan_tables import layout_columns, layout_rows

    columns, rows = layout_columns(answer.priced), layout_rows(answer.priced)
    cells = [["" if v is None else column.human(v) for column, v in zip(columns, row, strict=True)] for row in rows]
    return _table([column.name for column in columns], cells, [column.left for column in columns], chosen=shown - 1)


def _memory(row: Priced) -> str:
    """A column per pipeline rank."""
    ranks = row.memory
    terms = list(dict.fromkeys(term for rank in ranks for term in rank.terms))
    rows = [["stages", *(", ".join(map(str, rank.stages)) for rank in ranks)]]
    for term in terms:
        rows.append([term, *(f"{rank.terms[term] / 2**30:,.3f}" if term in rank.terms else "" for rank in ranks)])
    rows.append(["total", *(f"{rank.total / 2**30:,.3f}" for rank in ranks)])
    rows.append(["most is held", *(rank.moment for rank in ranks)])
    heads = ["GiB", *(f"rank {index}" for index in range(len(ranks)))]
    return _table(heads, rows, [True] + [False] * len(ranks))


def _accelerator(answer: Answer) -> str:
    import dataclasses

    chip = answer.question.accelerator
    sources = chip.sources or {}
    rows = [
        [field.name, _plain(getattr(chip, field.name)), sources.get(field.name, "")]
        for field in dataclasses.fields(chip)
        if field.name != "sources"
    ]
    return _table(["", "value", "source"], rows, [True, False, True])


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(number)}" for key, number in value.items())
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[bool], chosen: int | None = None) -> str:
    def cells(tag: str, values: Sequence[str]) -> str:
        kinds = [' class="text"' if text else "" for text in left]
        return "".join(f"<{tag}{kind}>{escape(value)}</{tag}>" for kind, value in zip(kinds, values, strict=True))

    marks = [' class="chosen"' if index == chosen else "" for index in range(len(rows))]
    lines = [f"<tr{mark}>{cells('td', row)}</tr>" for mark, row in zip(marks, rows, strict=True)]
    return f'<div class="wide"><table><tr>{cells("th", heads)}</tr>\n' + "\n".join(lines) + "</table></div>"


def _list(lines: Iterator[str]) -> str:
    items = "\n".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>\n{items}\n</ul>" if items else ""


def _paragraphs(lines: Iterator[str]) -> str:
    return "\n".join(f"<p>{escape(line)}</p>" for line in lines)
