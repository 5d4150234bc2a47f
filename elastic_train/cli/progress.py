"""Progress bars of long reads and writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Progress


def progress_bar(transient: bool = False) -> Progress:
    """A bar with bytes, bytes/s and time left, on stderr; nothing where that is no terminal. Stays unless transient."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=20),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=transient, disable=not console.is_terminal)


def phase_reporter(progress: Progress) -> Callable[[str, int, int], None]:
    """A callback (phase, done, total) that gives each phase a bar of its own."""
    tasks: dict[str, Any] = {}

    def report(phase: str, done: int, total: int) -> None:
        if phase not in tasks:
            tasks[phase] = progress.add_task(phase, total=total, completed=done)  # done before: not a matter of speed
        progress.update(tasks[phase], completed=done, total=total)

    return report
