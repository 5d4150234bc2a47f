"""The tables of ``benchmarks/recovery.py``: medians beside what is aimed at."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

PARTS = ("detection", "teardown", "form", "restore", "first_step")

Row = dict[str, float]
"""One failure: ``seconds`` until the next finished step, of which ``pause`` are beyond a usual step, and so on."""


@dataclass(frozen=True, slots=True)
class Aim:
    """The median of ``figure`` is to be at most ``seconds``, and no step may be lost."""

    seconds: float
    figure: str = "seconds"

    def met(self, rows: list[Row]) -> bool:
        median = statistics.median(row[self.figure] for row in rows)
        return median <= self.seconds and not any(row["steps_lost"] for row in rows)

    def __str__(self) -> str:
        return f"{self.seconds:g}" + (" of pause" if self.figure == "pause" else "")


AIMS = {
    "trainer": Aim(0.5),
    "hang": Aim(1.5),
    "node": Aim(2.0),
    "partition": Aim(5.0),
    "drain": Aim(1.0, "pause"),
    "growth": Aim(5.0, "pause"),
    "coordinator": Aim(0.0, "pause"),
}
"""On four hosts. A pause of 0: in most repeats no step is longer than the longest of as many steps before."""


def table(results: dict[str, list[Row]]) -> str:
    """By kind of failure, in seconds."""
    head = ("failure", "median s", "min", "max", "n", "pause", "aim", "met", "steps lost", "steady step, s")
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for kind, measured in results.items():
        seconds = [row["seconds"] for row in measured]
        pause, step = (statistics.median(row[name] for row in measured) for name in ("pause", "steady_step_seconds"))
        aim = AIMS.get(kind)
        cells = [kind, f"{statistics.median(seconds):.2f}", f"{min(seconds):.2f}", f"{max(seconds):.2f}"]
        cells += [f"{len(seconds)}", f"{pause:.2f}", str(aim or ""), _answer(aim, measured)]
        cells += [f"{sum(row['steps_lost'] for row in measured):.0f}", f"{step:.2f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _answer(aim: Aim | None, rows: list[Row]) -> str:
    return "" if aim is None else "yes" if aim.met(rows) else "no"


def parts_table(results: dict[str, list[Row]]) -> str:
    """Medians of what the ledger says of each recovery, in seconds."""
    rows = [f"| failure | {' | '.join(part.replace('_', ' ') for part in PARTS)} |", "|---" * (len(PARTS) + 1) + "|"]
    for kind, measured in results.items():
        if f"{PARTS[0]}_seconds" in measured[0]:
            medians = [statistics.median(row[f"{part}_seconds"] for row in measured) for part in PARTS]
            rows.append(f"| {kind} | {' | '.join(f'{seconds:.2f}' for seconds in medians)} |")
    return "\n".join(rows)
