"""Progress bars of long reads and writes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Progress


LEAST_SECONDS = 0.1
"""Between two updates of a phase: many at once, as of the documents of a batch, would look like a speed."""


def progress_bar(transient: bool = False, unit: str = "bytes") -> Progress:
    """A bar with how much is done and the time left, on stderr; nothing where that is no terminal. Bytes have a speed.

    Stays unless transient.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from elastic_train.cli.speed_column import SpeedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=20),
        *((DownloadColumn(), SpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(), TextColumn(unit))),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=transient, disable=not console.is_terminal)


def phase_reporter(progress: Progress) -> Callable[[str, int, int], None]:
    """A callback (phase, done, total) that gives each phase a bar of its own."""
    tasks: dict[str, Any] = {}
    told: dict[str, float] = {}

    def report(phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        if phase not in tasks:
            tasks[phase] = progress.add_task(phase, total=total, completed=done, before=done)  # not a matter of speed
        if done >= total or now - told.get(phase, 0.0) >= LEAST_SECONDS:
            progress.update(tasks[phase], completed=done, total=total)
            told[phase] = now

    return report
