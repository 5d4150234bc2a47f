"""The column of a progress bar that says how fast bytes are read or written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.filesize import decimal
from rich.progress import ProgressColumn
from rich.text import Text

if TYPE_CHECKING:
    from rich.progress import Task


class SpeedColumn(ProgressColumn):
    """Bytes/s of the last half minute; of the whole time where that is over before anything can be compared."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed or _mean(task)
        return Text(f"{decimal(int(speed))}/s" if speed else "?", style="progress.data.speed")


def _mean(task: Task) -> float:
    done = task.completed - task.fields.get("before", 0)
    return done / task.elapsed if task.elapsed else 0.0
