"""Figures on pages of docs/ that nothing has to be measured for: what commands say, and what the planner says.

    python -m benchmarks.documented           # what is out of date
    python -m benchmarks.documented --write   # brings it up to date

Each is a table, found by its heading line. ``tests/test_documented.py`` fails where one is out of date, but for those
of 54 days of 16,384 GPUs, which take a minute or two.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from benchmarks import layout_choice
from benchmarks.published_runs import rate_rows, utilisation_rows
from elastic_train.checkpoint.interval import daly, young
from elastic_train.cli.main import app
from elastic_train.planner.simulation.best import best_interval
from elastic_train.planner.simulation.confidence import Runs
from tests.planner.simulation.scenarios import MTBF, classic

DOCS = Path(__file__).parents[1] / "docs"
CHOICE = Path(__file__).parent / "measured" / "choice.json"
LLAMA3 = "simulate --like llama3"


@dataclass(frozen=True, slots=True)
class Table:
    """On ``page``, from the line ``rows()[0]`` on. ``quick``: a test compares it."""

    page: str
    rows: Callable[[], list[str]]
    quick: bool = True


def answer(command: str) -> dict[str, Any]:
    """What ``elastic-train COMMAND --json`` prints."""
    done = CliRunner().invoke(app, [*command.split(), "--json"], catch_exceptions=False)
    if done.exit_code:
        raise RuntimeError(f"elastic-train {command}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def costs() -> list[str]:
    """Of an example: its plan, then what failures add to it."""
    plan = "plan --model llama3-8b --gpus 64 --gpu h100-80gb --tokens 1T --price 2.5"
    first = answer(plan)["layouts"][0]
    asked = f"--step {first['step_seconds']:.2f}s --days {first['days']:.0f}"
    spare = f"simulate --nodes 8 --spares 1 {asked} --price 2.5"
    best = f"simulate --nodes 8 {asked} --best spares"
    spot = f"simulate --nodes 8 --spot 0.02/h {asked} --price 1.2"
    calm, stormy = means(answer(spare), "elastic"), means(answer(spot), "elastic")
    says = {
        plan: f"{first['step_seconds']:.2f} s a step, {first['days']:.2f} days, ${first['cost']:,.0f} without failures",
        spare: f"goodput {calm['goodput %']:.1f} %, ${calm['cost']:,.0f}, of which "
        f"${calm['cost of what was not useful']:,.0f} not useful; {calm['failures']:.1f} failures",
        best: f"best number of spare nodes: {answer(best)['best']['value']:.0f}",
        spot: f"{stormy['failures']:.0f} failures, progress {stormy['progress %']:.1f} % of the work of "
        f"{first['days']:.0f} days, ${stormy['cost']:,.0f}",
    }
    return [
        "| command | says |",
        "|---|---|",
        *(f"| `elastic-train {command}` | {says[command]} |" for command in says),
    ]


def means(found: dict[str, Any], recovery: str) -> dict[str, float]:
    return {name: each["mean"] for name, each in found["answers"][recovery]["figures"].items()}


def llama3() -> list[str]:
    """What recovery of either kind makes of Llama 3's failures."""
    asked = (
        LLAMA3,
        f"{LLAMA3} --recovery elastic --pause 60s",
        f"{LLAMA3} --recovery elastic --pause 10m",
        f"{LLAMA3} --recovery elastic --nodes 8192",
        f"{LLAMA3} --recovery restart --spares 0",
        f"{LLAMA3} --recovery restart --spares 0 --min-nodes 1",
    )
    rows = ["| command | recovery | ETTR % | waiting % | steps repeated | failures |", "|---|---|---|---|---|---|"]
    for command in asked:
        found = answer(command)
        for recovery in found["answers"]:
            mean = means(found, recovery)
            rows.append(
                f"| `elastic-train {command}` | {recovery} | {mean['ETTR %']:.1f} | {mean['waiting %']:.1f} | "
                f"{mean['steps lost']:,.0f} | {mean['failures']:,.0f} |"
            )
    return rows


def intervals() -> list[str]:
    """Best intervals of a machine that fails as a whole, and of Llama 3's restarts, beside the formulas."""
    rows = ["| best interval between checkpoints | simulated | Young | Daly |", "|---|---|---|---|"]
    for stall in (1.0, 20.0, 100.0):
        scenario, first = classic(stall), young(stall, MTBF)
        best = best_interval(Runs(scenario, 1, 1), scenario, around=first).value
        rows.append(
            f"| saves of {stall:.0f} s, a failure per {MTBF:,.0f} s | {best:,.4g} s | {first:,.4g} s | "
            f"{daly(stall, MTBF):,.4g} s |"
        )
    command = f"{LLAMA3} --recovery restart --best interval"
    found = answer(command)["best"]
    low, high = found["sure"]
    rows.append(
        f"| `elastic-train {command}`, whole steps of 10 s | {found['value']:.0f} s ({low:.0f} to {high:.0f} s) | "
        f"{found['formulas']['Young']:.0f} s | {found['formulas']['Daly']:.0f} s |"
    )
    return rows


TABLES = {
    "costs": Table("operations.md", costs),
    "published rates": Table("planner.md", rate_rows),
    "published utilisations": Table("planner.md", utilisation_rows),
    "intervals": Table("simulator.md", intervals, quick=False),
    "choice": Table("benchmarks.md", lambda: layout_choice.table(layout_choice.read(CHOICE), fastest=8)),
    "verdict": Table("benchmarks.md", lambda: layout_choice.summary(layout_choice.read(CHOICE))),
    "llama3": Table("simulator.md", llama3, quick=False),
}


def brought_up_to_date(table: Table) -> tuple[str, str]:
    """The page as it is and as it should be. Raises ValueError for a table that is not there once."""
    page, rows = (DOCS / table.page).read_text(), table.rows()
    before, found, rest = page.partition(f"\n{rows[0]}\n")
    if not found or f"\n{rows[0]}\n" in rest:
        raise ValueError(f"docs/{table.page}: the line {rows[0]!r} must be there once")
    after = rest.splitlines(keepends=True)
    while after and after[0].startswith("|"):
        del after[0]
    return page, before + "\n" + "\n".join(rows) + "\n" + "".join(after)


def out_of_date(*, write: bool) -> Iterator[str]:
    """Names of the tables that are."""
    for name, table in TABLES.items():
        page, wanted = brought_up_to_date(table)
        if page != wanted:
            yield name
            if write:
                (DOCS / table.page).write_text(wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write them")
    write = parser.parse_args().write
    names = list(out_of_date(write=write))
    for name in names:
        print(f"docs/{TABLES[name].page}: {name} {'brought up to date' if write else 'is out of date: --write'}")
    sys.exit(bool(names) and not write)


if __name__ == "__main__":
    main()
