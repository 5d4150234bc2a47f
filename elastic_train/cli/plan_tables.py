"""What ``elastic-train plan`` shows on a terminal: the question, the ranked layouts, why, and what was ruled out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import typer

from elastic_train.cli.tables import Column, count, is_narrow, print_table, size

if TYPE_CHECKING:
    from elastic_train.cli.plan_answer import Answer, Priced
    from elastic_train.planner.memory import RankMemory

WIDE = 130
"""Characters that all columns need."""
DETAILS = ("options", "of limit", "bubble", "exposed")
"""Columns that are written below the table where it is narrower."""
COLUMNS_OF_RANKS = 6
"""Pipeline ranks side by side; of more the first ones, the fullest and the last one."""


def print_answer(answer: Answer, *, per_stage: int | None, traffic: int | None) -> None:
    """``per_stage``: the number of the layout whose memory is itemised; ``traffic``: of which exchanges are listed."""
    for line in question_lines(answer):
        typer.echo(line)
    typer.echo()
    narrow = is_narrow(WIDE)
    shown = [i for i, column in enumerate(layout_columns(answer.priced)) if not (narrow and column.name in DETAILS)]
    columns, rows = layout_columns(answer.priced), layout_rows(answer.priced)
    print_table([columns[i] for i in shown], [[row[i] for i in shown] for row in rows])
    details = detail_lines(answer.priced) if narrow else ()
    for line in (*details, *why_lines(answer), *rejected_lines(answer)):
        typer.echo(line)
    if per_stage is not None:
        typer.echo()
        _print_memory(answer.priced[per_stage - 1])
    if traffic is not None:
        typer.echo()
        _print_traffic(answer.priced[traffic - 1])


def question_lines(answer: Answer) -> Iterator[str]:
    """The model, the machines, and what was assumed."""
    from elastic_train.cli.report import parameter_count

    question, work = answer.question, answer.work
    job, chip, (rule, *_) = question.job, question.accelerator, work
    yield (
        f"{job.name}: {parameter_count(job)} parameters; {job.training.global_batch:,} sequences of "
        f"{job.data.sequence_length:,} tokens a step = {question.tokens_per_step:,} tokens"
    )
    yield (
        f"FLOPs per token: {work[rule]:.4g} by {rule}, {work['full']:.4g} with attention in full, "
        f"{work['causal']:.4g} as causal attention computes it"
    )
    yield (
        f"{question.gpus:,} x {chip.name}: {question.memory_limit / 2**30:,.2f} GiB each, "
        f"{chip.peak(job.training.precision) / 1e12:,.4g} TFLOP/s in {job.training.precision}, "
        f"{chip.per_node} a node; efficiency {chip.efficiency:.3g}"
    )
    band = "" if answer.calibration else "; without --calibrate expect them to be off by up to 25 %"
    yield (
        f"days and cost: {question.tokens:,.0f} tokens = {question.tokens / question.tokens_per_step:,.0f} steps, "
        f"on {question.gpus:,} accelerators that are paid for, idle or not{band}"
    )
    if job.parallel.offload:
        yield f"offloaded state: {chip.host_memory_bytes / 2**30:,.0f} GiB of CPU memory on a node are its limit"
    if question.assumed:
        yield f"assumed: {'; '.join(question.assumed)}"
    yield from answer.calibration


def layout_columns(rows: Sequence[Priced]) -> list[Column]:
    """Of the table of layouts; the last one only where there is a price."""
    columns = [
        Column("#"),
        Column("layout", left=True),
        Column("GPUs", count),
        Column("options", left=True),
        Column("memory", lambda nbytes: f"{nbytes / 2**30:,.1f} GiB"),
        Column("of limit", lambda share: f"{share:.0%}"),
        Column("s/step", lambda seconds: f"{seconds:,.4g}"),
        Column("tokens/s", lambda rate: f"{rate:,.0f}"),
        Column("MFU causal", lambda share: f"{share:.1%}"),
        Column("bubble", lambda share: f"{share:.1%}"),
        Column("exposed", lambda share: f"{share:.1%}"),
        Column("days", lambda days: f"{days:,.4g}" if days >= 0.01 else "<0.01"),
    ]
    if rows[0].cost is not None:
        columns.append(Column("cost", lambda cost: f"{cost:,.0f} {rows[0].currency}".strip()))
    return columns


def detail_lines(rows: Sequence[Priced]) -> Iterator[str]:
    """What ``DETAILS`` would say."""
    columns = layout_columns(rows)
    for number, cells in enumerate(layout_rows(rows), start=1):
        found = {column.name: column.human(cell) for column, cell in zip(columns, cells, strict=True)}
        rest = "; ".join(f"{found[name]} {name}" for name in DETAILS[1:])
        yield f"#{number} {found['layout']}: {found['options']}; {rest}"


def layout_rows(rows: Sequence[Priced]) -> list[tuple[object, ...]]:
    """Exact values, in the order of ``layout_columns``."""
    return [_cells(number, row) for number, row in enumerate(rows, start=1)]


def _cells(number: int, row: Priced) -> tuple[object, ...]:
    plan = row.candidate
    return (
        number,
        plan.layout,
        plan.layout.world_size,
        options_text(plan.options),
        plan.fullest.total,
        plan.fullest.total / row.memory_limit,
        plan.time.total,
        plan.time.tokens_per_second,
        plan.time.use.mfu_causal,
        plan.time.bubble,
        plan.time.exposed / plan.time.total,
        row.days,
        *(() if row.cost is None else (row.cost,)),
    )


def options_text(options: dict[str, str | int | bool]) -> str:
    """``zero3 resharded, micro-batch 2, recompute full, ulysses, interleaved_1f1b v4``"""
    parts = [f"{options['data']}{' resharded' if options.get('reshard_after_forward') else ''}"]
    parts.append(f"micro-batch {options['micro_batch']}")
    if options["recompute"] != "none":
        parts.append(f"recompute {options['recompute']}")
    if "context" in options:
        parts.append(str(options["context"]))
    if "pipeline" in options:
        stages = f" v{options['virtual_stages']}" if "virtual_stages" in options else ""
        parts.append(f"{options['pipeline']}{stages}")
    return ", ".join(parts)


def why_lines(answer: Answer) -> Iterator[str]:
    if answer.as_is is not None:
        yield answer.as_is
    for number, row in enumerate(answer.priced, start=1):
        if row.reasons:
            yield f"#{number} {row.candidate.layout}: {'; '.join(row.reasons)}"


def rejected_lines(answer: Answer) -> Iterator[str]:
    """One line per limit: how many layouts it rules out, and the one that misses it by least."""
    for entry in answer.ranking.rejected.values():
        many = f"{entry.count:,} layout{'' if entry.count == 1 else 's'}"
        if entry.limit == "slower":
            yield f"{many} slower than those shown; nearest: {entry.example}"
        elif entry.limit == "memory":
            yield f"{many} ruled out by memory; nearest: {entry.example}"
        else:
            yield f"{entry.count:,} ruled out by {entry.limit}; for example: {entry.example}"


def _print_memory(row: Priced) -> None:
    """Terms by pipeline rank, in GiB (bytes where the output is no terminal)."""
    ranks = row.memory
    shown = _some(ranks)
    terms = list(dict.fromkeys(term for rank in ranks for term in rank.terms))
    left_out = "" if len(shown) == len(ranks) else f"; {len(shown)} of {len(ranks)} pipeline ranks, --json has all"
    typer.echo(f"memory of {row.candidate.layout}, by pipeline rank{left_out}")
    heads = [f"rank {index}" for index in shown]
    table: list[list[object]] = [["stages", *("+".join(map(str, ranks[index].stages)) for index in shown)]]
    table += [[term, *(ranks[index].terms.get(term) for index in shown)] for term in terms]
    table.append(["total", *(ranks[index].total for index in shown)])
    table.append(["limit", *(row.memory_limit for _ in shown)])
    print_table(
        [Column("GiB", left=True), *(Column(head, _gib) for head in heads)],
        table,
    )
    for line in (*state_lines(row), *host_lines(row)):
        typer.echo(line)


def _gib(cell: object) -> str:
    """Numbers of stages stay as they are."""
    return f"{cell / 2**30:,.3f}" if isinstance(cell, int) else str(cell)


def state_lines(row: Priced) -> Iterator[str]:
    """Model state by both accountings."""
    unit, name = (2**30, "GiB") if row.state["engine"] >= 2**30 else (2**20, "MiB")
    yield f"model state, textbook ({row.state_formula}): {row.state['textbook'] / unit:,.2f} {name}"
    yield f"model state, this engine, fullest rank: {row.state['engine'] / unit:,.2f} {name}"


def host_lines(row: Priced) -> Iterator[str]:
    """What is in CPU memory; nothing without ``parallel.offload``."""
    fullest = max((rank.host for rank in row.memory), key=lambda terms: sum(terms.values()))
    if fullest:
        terms = ", ".join(f"{term} {nbytes / 2**30:,.2f} GiB" for term, nbytes in fullest.items())
        yield f"CPU memory of a node: {row.host_bytes / 2**30:,.2f} GiB; of the fullest rank {terms}"


def _print_traffic(row: Priced) -> None:
    """What the pipeline rank that sends most sends in a step, the slowest first."""
    typer.echo(f"exchanges of {row.candidate.layout} in a step, of the pipeline rank that sends most")
    columns = [
        Column("axis", left=True),
        Column("what", left=True),
        Column("collective", left=True),
        Column("times", count),
        Column("sent", size),
        Column("seconds", lambda seconds: f"{seconds:,.3g}"),
        Column("beside", left=True),
    ]
    rows = sorted(row.traffic, key=lambda each: -each.seconds)
    print_table(
        columns,
        [
            (x.exchange.axis, x.exchange.what, x.exchange.collective, x.exchange.count, int(x.exchange.sent_bytes),
             x.seconds, x.exchange.overlaps)
            for x in rows
        ],
    )  # fmt: skip


def _some(ranks: Sequence[RankMemory]) -> list[int]:
    """Indices of the pipeline ranks that are shown."""
    if len(ranks) <= COLUMNS_OF_RANKS:
        return list(range(len(ranks)))
    fullest = max(range(len(ranks)), key=lambda index: ranks[index].total)
    return sorted({0, 1, 2, fullest, len(ranks) - 2, len(ranks) - 1})
